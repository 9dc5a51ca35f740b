#!/usr/bin/env bash
# Run deploy/slurm on a real Slurm: two nodes in namespaces of their own, four ranks of which one is slow, no service.
# The verdict, from the first node's epilog, has to reach the accounting database.
#
#   tools/test_slurm.sh
#
# Takes a minute. Needs root, .venv, and Debian's slurmctld, slurmd, slurm-client, slurmdbd, munge,
# mariadb-server-core, mariadb-client-core and iproute2. Nothing of it is left: mounts, network and processes are in namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != --inside ]; then
  for program in slurmctld slurmd slurmdbd sacctmgr munged mariadbd ip; do
    command -v "$program" >/dev/null || { echo "test_slurm: $program is missing" >&2; exit 1; }
  done
  exec unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc "$0" --inside
fi

hostname ctl
root=$PWD
work=/srv/slurm
python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
case $python in
  /root/*)
    # The user of the job has to reach this Python.
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir -p /mnt/python
    mount --bind "$python" /mnt/python
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$python"
    mount --bind /mnt/python "$python"
    ;;
esac
for place in /srv /run /home /var/log /var/spool; do mount -t tmpfs -o mode=755 tmpfs "$place"; done
mkdir -p "$work/bin" "$work/state" "$work/database" /run/mysqld /run/munge /home/ada/share
log() { printf '%4ds  %s\n' "$SECONDS" "$1"; }
fail() {
  echo "test_slurm: $1" >&2
  tail -n 20 "$work"/*.log /home/ada/share/*.out >&2 || true
  exit 1
}
trap 'fail "line $LINENO"' ERR
until_true() {
  local seconds=$1
  shift
  for _ in $(seq "$seconds"); do "$@" >/dev/null 2>&1 && return; sleep 1; done
  fail "this was not so within $seconds s: $*"
}

# Names, a user, and a network of three hosts.
printf '127.0.0.1 localhost\n10.77.0.1 ctl\n10.77.0.2 n1\n10.77.0.3 n2\n' >"$work/hosts"
{ cat /etc/passwd; echo 'ada:x:61001:61001::/home/ada:/bin/bash'; } >"$work/passwd"
{ cat /etc/group; echo 'ada:x:61001:'; } >"$work/group"
for name in hosts passwd group; do mount --bind "$work/$name" "/etc/$name"; done
chown -R 61001:61001 /home/ada
ip link set lo up
ip link add bridge type bridge
ip address add 10.77.0.1/24 dev bridge
ip link set bridge up
for n in 1 2; do
  ip netns add "n$n"
  ip link add "n$n" type veth peer name eth0 netns "n$n"
  ip link set "n$n" master bridge up
  ip -n "n$n" link set lo up
  ip -n "n$n" address add "10.77.0.$((n + 1))/24" dev eth0
  ip -n "n$n" link set eth0 up
done

# Slurm, with the scripts of deploy/slurm as a site would install them.
cp deploy/slurm/*.sh "$work"
sed -i "s|:-/usr/bin/torchperfd}|:-$work/bin/torchperfd}|" "$work/epilog.sh"
for program in torchperfd:torchperfd torchrun:torch.distributed.run; do
  printf '#!/bin/sh\nexec %s/.venv/bin/python -m %s "$@"\n' "$root" "${program#*:}" >"$work/bin/${program%:*}"
done
chmod 755 "$work"/bin/*
cat >"$work/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=gpu
Prolog=$work/prolog.sh
Epilog=$work/epilog.sh
TaskProlog=$work/task_prolog.sh
NodeName=n1 NodeAddr=10.77.0.2 CPUs=4 RealMemory=500 Gres=gpu:2
NodeName=n2 NodeAddr=10.77.0.3 CPUs=4 RealMemory=500 Gres=gpu:2
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=10
CONF
# Any two devices take the place of GPUs.
echo 'NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero' >"$work/gres.conf"
cat >"$work/slurmdbd.conf" <<CONF
AuthType=auth/munge
DbdHost=ctl
SlurmUser=root
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm
CONF
chmod 600 "$work/slurmdbd.conf"
mount --bind "$work" /etc/slurm
export SLURM_CONF=/etc/slurm/slurm.conf

head -c 64 /dev/urandom >"$work/munge.key"
chmod 400 "$work/munge.key"
munged --force --key-file="$work/munge.key" --log-file="$work/munged.log" --seed-file=/run/munge/seed
mariadb-install-db --user=root --datadir="$work/database" --skip-test-db >"$work/install.log" 2>&1
mariadbd --no-defaults --user=root --datadir="$work/database" --socket=/run/mysqld/mysqld.sock --skip-networking \
  >"$work/mariadbd.log" 2>&1 &
until_true 60 test -S /run/mysqld/mysqld.sock
slurmdbd -D >"$work/slurmdbd.log" 2>&1 &
until_true 60 sacctmgr -i add cluster test
slurmctld -D -c >"$work/slurmctld.log" 2>&1 &
for n in 1 2; do
  # Not `ip netns exec`, which hides the control groups that slurmd wants.
  nsenter --net="/run/netns/n$n" unshare --mount --uts bash -c \
    "hostname n$n && mount -t tmpfs -o mode=1777 tmpfs /tmp && mkdir /tmp/munge && mount --bind /run/munge /tmp/munge &&
      mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/munge && mount --move /tmp/munge /run/munge &&
      exec slurmd -D -N n$n" \
    >"$work/n$n.log" 2>&1 &
done
until_true 60 sh -c '[ "$(sinfo -h -t idle -o %D)" = 2 ]'
log "two nodes are idle"

cat >/home/ada/share/train.py <<'PYTHON'
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(400):
    optimizer.zero_grad()
    if dist.get_rank() == 3:
        time.sleep(0.03)
    model(torch.rand(64, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
PYTHON
submit() {
  (cd /home/ada/share && setpriv --reuid 61001 --regid 61001 --clear-groups env -i HOME=/home/ada \
    PATH="$work/bin:$PATH" OMP_NUM_THREADS=1 SLURM_CONF="$SLURM_CONF" sbatch --parsable --time=5 --output=%j.out "$@")
}
comment() { sacct -n -X -P -j "$1" --format=AdminComment; }
is_over() { [ -z "$(squeue -h -j "$1")" ]; }
# The lines of deploy/slurm/README.md, for nodes of this size.
page=$root/deploy/slurm/README.md
batch=$(sed -n "s|^sbatch --nodes=4 --gpus-per-node=8 |--nodes=2 --gpus-per-node=2 $root/deploy/slurm/|p" "$page")
query=$(sed -n "s/^\$ \(sacct .*-j \)4711/\1JOB/p" "$page")
[ -n "$batch" ] && [ -n "$query" ] || fail "the page has no such lines"

# shellcheck disable=SC2086
job=$(submit --job-name="x'; touch /tmp/planted; \$(id)" --cpus-per-task=1 $batch)
until_true 120 is_over "$job"
log "the job is over: $(sacct -n -X -P -j "$job" --format=State,Elapsed)"
until_true 30 sh -c "sacct -n -X -P -j $job --format=AdminComment | grep -q torchperfd"
log "its comment is: $(comment "$job")"
comment "$job" | grep -Eq '^torchperfd: slow rank, rank 3 on n2, [0-9]+% of the step' || fail "another verdict was expected"
${query/JOB/$job} | grep -Eq "^$job +torchperfd: slow rank, rank 3 on n2" || fail "the page's query shows something else"
[ -z "$(ls -A /home/ada/share/.torchperfd-fleet-* 2>/dev/null)" ] || fail "the secret of the job is left"

job=$(submit --nodes=2 --wrap 'srun true')
until_true 60 is_over "$job"
sleep 5
[ -z "$(comment "$job")" ] || fail "a job without training has a comment: $(comment "$job")"
[ "$(sinfo -h -t idle -o %D)" = 2 ] || fail "a node is out of service: $(sinfo -h)"
log "a job without training has none, and both nodes are idle"
