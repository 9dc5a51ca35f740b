-- Runs with a mean step, numbered within their job from the oldest on.
SELECT
  *,
  row_number() OVER (
    PARTITION BY cluster, owner, job, ranks_of_job ORDER BY began_unix_seconds
  ) AS number
FROM recent_runs
WHERE mean_step > 0
ORDER BY began_unix_seconds, run
