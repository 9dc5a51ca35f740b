#!/bin/sh
# Slurm's Prolog, as root on each node of a job: notes when the job began, for epilog.sh. A Prolog that fails takes
# its node out of service, so that this one ends with 0 in any case.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
umask 022
marks=${marks:-/run/torchperfd-jobs}
socket=${socket:-/run/torchperfd}

case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
# Of root alone, as /run is: no user can plant a mark or a link.
mkdir -p -m 700 "$marks" 2>/dev/null && : 2>/dev/null >"$marks/$SLURM_JOB_ID"
# A container whose mounts name the service's directory starts without the service, too.
[ -e "$socket" ] || mkdir "$socket" 2>/dev/null
exit 0
