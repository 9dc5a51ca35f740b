-- Predicted savings, and what the next run of the same job showed.
SELECT
  before_it.cluster AS cluster,
  before_it.owner AS owner,
  before_it.job AS job,
  before_it.run AS run_before,
  after_it.run AS run_after,
  before_it.named_cause AS cause,
  before_it.named_fix AS fix,
  before_it.promised_ratio AS promised_ratio,
  1 - after_it.mean_step / before_it.mean_step AS measured_ratio,
  CASE
    WHEN 1 - after_it.mean_step / before_it.mean_step >= 0.5 * before_it.promised_ratio THEN 'came true'
    WHEN 1 - after_it.mean_step / before_it.mean_step > 0.05 THEN 'in part'
    ELSE 'not seen'
  END AS outcome
FROM numbered_runs AS before_it
JOIN numbered_runs AS after_it
  ON before_it.cluster = after_it.cluster
  AND before_it.owner = after_it.owner
  AND before_it.job = after_it.job
  AND before_it.ranks_of_job = after_it.ranks_of_job
  AND before_it.number + 1 = after_it.number
WHERE before_it.promised_ratio > 0
ORDER BY measured_ratio DESC, run_after
