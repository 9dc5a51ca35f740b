-- Hours lost to each cause, as the verdicts of all nodes measured them.
SELECT
  cause,
  count(DISTINCT run) AS runs,
  count(DISTINCT owner) AS owners,
  sum(lost_seconds * gpus) / 3600 AS lost_gpu_hours,
  sum(lost_seconds) / 3600 AS lost_node_hours
FROM verdicts
WHERE cause NOT IN ('none', 'unknown')
GROUP BY cause
ORDER BY lost_gpu_hours DESC, lost_node_hours DESC, cause
