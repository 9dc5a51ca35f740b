-- Predicted savings, and what the next run of the same job showed.
SELECT
  cluster,
  owner,
  job,
  run_before,
  run_after,
  cause,
  fix,
  promised_ratio,
  -change_ratio AS measured_ratio,
  CASE
    WHEN -change_ratio >= 0.5 * promised_ratio THEN 'came true'
    WHEN -change_ratio > 0.05 THEN 'in part'
    ELSE 'not seen'
  END AS outcome
FROM consecutive_runs
WHERE promised_ratio > 0
ORDER BY measured_ratio DESC, run_after
