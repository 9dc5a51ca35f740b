-- Nodes that verdicts blame, by the hours that they cost.
SELECT
  cluster,
  CASE WHEN culprit_node = '' THEN node ELSE culprit_node END AS blamed_node,
  cause,
  count(DISTINCT run) AS runs,
  sum(lost_seconds * gpus) / 3600 AS lost_gpu_hours,
  sum(lost_seconds) / 3600 AS lost_node_hours
FROM verdicts
WHERE cause NOT IN ('none', 'unknown') AND lost_seconds > 0
GROUP BY cluster, blamed_node, cause
ORDER BY lost_gpu_hours DESC, lost_node_hours DESC, blamed_node, cause
