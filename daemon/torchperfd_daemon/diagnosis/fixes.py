"""What to change for each cause, in one line; the setting, the call or the command comes first."""

from collections.abc import Mapping
from typing import Final

from torchperfd.card.script_name import SCRIPT
from torchperfd_daemon.diagnosis.remedies import contention_remedy
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict

_FIXES: Final[Mapping[Cause, str]] = {
    Cause.INPUT_BOUND: f"`torchperfd tune {SCRIPT}` tries settings of the loader and verifies them; or do"
    " less for each sample in __getitem__",
    Cause.HOST_BOUND: 'torch.compile(model, mode="reduce-overhead"), or a larger batch_size, so that each'
    " launch gives the device more work",
    Cause.SYNCHRONISATION: "`if step % 50 == 0:` before the call that waits, or keep values on the device",
    Cause.SLOW_RANK: "give this rank as much work as its peers; if it has as much, run `torchperfd doctor` on"
    " its node",
    Cause.GARBAGE_COLLECTION: "gc.freeze(); gc.disable() before the loop, and gc.collect() every few hundred"
    " steps, at the same step on all ranks",
    Cause.CPU_CONTENTION: contention_remedy(None).fix,
    Cause.CGROUP_THROTTLING: "raise the CPU limit of the container (docker run --cpus, Kubernetes"
    " resources.limits.cpu), or run fewer workers",
    Cause.SLOW_IO: "copy the data to a local disk, or store it in fewer, larger files",
    Cause.GPU_THROTTLING: "`nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE` names the limit; improve cooling,"
    " or raise the power limit",
    Cause.GPU_SHARED: "CUDA_VISIBLE_DEVICES=<a free device>; `nvidia-smi` lists the processes on this one",
    Cause.COLLECTIVE: "NCCL_DEBUG=INFO shows which network is used, NCCL_SOCKET_IFNAME selects one; or"
    " exchange less often, with gradient accumulation under model.no_sync()",
    Cause.PIPELINE_IMBALANCE: "move layers from the slowest stage of the pipeline to the others",
    Cause.CHECKPOINT: "torch.distributed.checkpoint.async_save(...), or save less often",
    Cause.RECOMPILATION: "torch.compile(model, dynamic=True), or pad inputs to a few shapes;"
    " TORCH_LOGS=recompiles names what has changed",
    Cause.MEMORY_PRESSURE: "keep numbers instead of tensors in lists (loss.item(), not loss), or use fewer"
    " workers and a smaller prefetch_factor",
    Cause.SCRIPT_CODE: "`if step % 50 == 0:` before code that each step need not run, or tensor operations in"
    " place of its loops in Python",
    Cause.UNEVEN_WORK: "batches of samples of similar length (a sampler that sorts by length), so that all"
    " ranks work equally long in each step",
    Cause.INTERPRETER_LOCK: "run the thread's work in a process (multiprocessing), or less often; Python runs"
    " one thread at a time",
    Cause.CPU_AFFINITY: "undo the CPU affinity: `taskset -acp` shows it, and os.sched_setaffinity(0, ...)"
    " after the imports changes it",
    Cause.TOO_MANY_THREADS: "torch.set_num_threads(N), or OMP_NUM_THREADS=N, with N the CPUs of each rank",
    Cause.EPOCH_START: "DataLoader(..., persistent_workers=True), so that workers are started once and not in"
    " each epoch",
    Cause.SLOW_WORKER: "DataLoader(..., in_order=False), or shards of equal cost for each worker",
    Cause.WORKER_OVERHEAD: "DataLoader(..., num_workers=0): making a batch costs less than taking it over"
    " from a worker",
    Cause.GROWING_STEPS: "keep numbers instead of tensors in lists (loss.item(), not loss), and detach"
    " tensors that are carried from step to step",
    Cause.DEBUG_SWITCH: "switch it off: torch.autograd.set_detect_anomaly(False), or unset the variable",
    Cause.SCRIPT_COLLECTIVES: "put the values into one tensor, and reduce it only at the steps that log:"
    " `if step % 50 == 0: dist.all_reduce(values)`",
    Cause.SMALL_BATCHES: "a larger batch_size, with the learning rate adapted to it",
    Cause.HANG: "make every rank enter the same collectives in the same order; the stacks show where each one"
    " stands",
}


def fix_of(verdict: Verdict) -> str:
    """Return what to change: a remedy with a predicted saving, else the usual one; empty without a cause."""
    return verdict.fix or _FIXES.get(verdict.cause, "")
