-- Runs whose step is over 5 % longer than that of the run before, with another version of something.
SELECT
  cluster,
  owner,
  job,
  run_before,
  run_after,
  step_seconds_before,
  step_seconds_after,
  change_ratio,
  torch_before,
  torch_after,
  python_before,
  python_after,
  torchperfd_before,
  torchperfd_after
FROM consecutive_runs
WHERE change_ratio > 0.05
  AND (
    torch_before <> torch_after
    OR python_before <> python_after
    OR torchperfd_before <> torchperfd_after
  )
ORDER BY change_ratio DESC, run_after
