-- Goodput and GPU hours of each owner, by day.
SELECT
  date,
  owner,
  count(DISTINCT run) AS runs,
  sum(gpus * (until_unix_seconds - since_unix_seconds)) / 3600 AS gpu_hours,
  sum(until_unix_seconds - since_unix_seconds) / 3600 AS rank_hours,
  sum(productive_seconds) / sum(until_unix_seconds - since_unix_seconds) AS goodput_ratio
FROM goodput
GROUP BY date, owner
ORDER BY date DESC, rank_hours DESC, owner
