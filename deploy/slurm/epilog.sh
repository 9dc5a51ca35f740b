#!/bin/sh
# Slurm's Epilog, as root on each node of a job: the job's first node writes verdict and goodput of its training into
# the accounting database, `sacct --format=AdminComment`. What was there is replaced. If nothing is known, nothing is
# written.
#
# It needs prolog.sh, ends with 0 at once, and leaves the work to a process of its own, ended after 25 seconds.
# Change these where your site has other places:
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
torchperfd=${torchperfd:-/usr/bin/torchperfd}
marks=${marks:-/run/torchperfd-jobs}
seconds=${seconds:-20}

comment() {
  # Parsing the list asks no daemon.
  [ -z "${SLURM_NODELIST:-}" ] || [ "$(scontrol show hostnames "$SLURM_NODELIST" | head -n 1)" = "${SLURMD_NODENAME:-}" ] || return
  home=$(getent passwd "$SLURM_JOB_UID" | cut -d : -f 6)
  # Root's Python gets nothing from its surroundings; it gives up its rights before it reads what the user wrote.
  cd / || return
  line=$(env -i HOME="${home:-/nonexistent}" PATH=/usr/bin:/bin LANG=C.UTF-8 \
    PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    ${TORCHPERFD_SOCKET:+TORCHPERFD_SOCKET="$TORCHPERFD_SOCKET"} \
    ${TORCHPERFD_SERVICE_USER:+TORCHPERFD_SERVICE_USER="$TORCHPERFD_SERVICE_USER"} \
    SLURM_JOB_UID="$SLURM_JOB_UID" SLURM_JOB_START_TIME="$began" \
    "$torchperfd" diagnose --slurm-job "$SLURM_JOB_ID" 2>/dev/null | head -n 1 |
    LC_ALL=C tr -cd 'A-Za-z0-9 .,:;%()_/-' | head -c 200)
  # Not `scontrol update`, which refuses a job that has ended.
  [ -z "$line" ] || sacctmgr -i update job where ${SLURM_CLUSTER_NAME:+cluster="$SLURM_CLUSTER_NAME"} \
    jobid="$SLURM_JOB_ID" set AdminComment="torchperfd: $line"
}

if [ "${1:-}" = --comment ]; then
  began=$2
  comment
  exit 0
fi
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
case ${SLURM_JOB_UID:-} in '' | *[!0-9]*) exit 0 ;; esac
began=$(stat -c %Y "$marks/$SLURM_JOB_ID" 2>/dev/null) || exit 0
rm -f "$marks/$SLURM_JOB_ID"
# A session of its own outlives this script, whose process group Slurm ends.
setsid -f timeout -k 5 "$seconds" sh "$0" --comment "$began" </dev/null >/dev/null 2>&1
exit 0
