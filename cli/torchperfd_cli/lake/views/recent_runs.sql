-- Runs that have ended, on all nodes, the newest first.
SELECT
  cluster,
  owner,
  job,
  run,
  min(since_unix_seconds) AS began_unix_seconds,
  max(until_unix_seconds) AS ended_unix_seconds,
  max(world_size) AS ranks_of_job,
  sum(ranks) AS ranks_seen,
  max(steps) AS most_steps,
  max(mean_step_seconds) AS mean_step,
  max(saves_seconds / nullif(step_seconds, 0)) AS promised_ratio,
  min(ending) AS endings,
  max(fix) AS named_fix,
  min(cause) AS named_cause,
  max(torch_version) AS torch,
  max(python_version) AS python,
  max(client_version) AS torchperfd
FROM runs
GROUP BY cluster, owner, job, run
ORDER BY ended_unix_seconds DESC, run
