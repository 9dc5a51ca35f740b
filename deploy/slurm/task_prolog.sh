#!/bin/sh
# Slurm's TaskProlog, as the user before each task: names the run after the job, and the job as Slurm does, unless
# the user has. Slurm takes `export NAME=value` from the output, up to the end of the line and without quotes.
[ -n "${TORCHPERFD_RUN:-}" ] || [ -z "${SLURM_JOB_ID:-}" ] || printf 'export TORCHPERFD_RUN=slurm-%s\n' "$SLURM_JOB_ID"
if [ -z "${TORCHPERFD_JOB:-}" ] && [ -n "${SLURM_JOB_NAME:-}" ]; then
  # A line break would begin another line.
  printf 'export TORCHPERFD_JOB=%s\n' "$(printf %s "$SLURM_JOB_NAME" | tr -d '[:cntrl:]')"
fi
exit 0
