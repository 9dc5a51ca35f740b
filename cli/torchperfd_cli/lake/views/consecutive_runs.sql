-- Runs with a mean step, each beside the run of its job before it.
SELECT
  before_it.cluster AS cluster,
  before_it.owner AS owner,
  before_it.job AS job,
  before_it.run AS run_before,
  after_it.run AS run_after,
  before_it.mean_step AS step_seconds_before,
  after_it.mean_step AS step_seconds_after,
  after_it.mean_step / before_it.mean_step - 1 AS change_ratio,
  before_it.named_cause AS cause,
  before_it.named_fix AS fix,
  before_it.promised_ratio AS promised_ratio,
  before_it.torch AS torch_before,
  after_it.torch AS torch_after,
  before_it.python AS python_before,
  after_it.python AS python_after,
  before_it.torchperfd AS torchperfd_before,
  after_it.torchperfd AS torchperfd_after
FROM numbered_runs AS before_it
JOIN numbered_runs AS after_it
  ON before_it.cluster = after_it.cluster
  AND before_it.owner = after_it.owner
  AND before_it.job = after_it.job
  AND before_it.ranks_of_job = after_it.ranks_of_job
  AND before_it.number + 1 = after_it.number
ORDER BY after_it.began_unix_seconds, run_after
