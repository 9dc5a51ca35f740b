"""What to change for each cause, in one line, and remedies that depend on a rank's loader and threads.

In a line the setting, the call or the command comes first. Savings are predicted for the loader only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from torchperfd.model.card import SCRIPT
from torchperfd.model.loader_facts import CROWDED, UNMEASURED_COST, LoaderAdvice, LoaderFacts, WorkerCost
from torchperfd.model.process import UNBOUND, CpuBinding
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.loader_workers import advise_loader, is_cheap

TUNE_THREADS: Final = f"`torchperfd tune --only threads {SCRIPT}` measures whether fewer threads are faster"
"""Beside other programs fewer threads may be faster. By how much is measured and never predicted."""
OWN_SHARE: Final = 0.9
"""From this part of its CPUs on, ranks have these to themselves.

Threads that are as many as the CPUs wait for each other by spinning. Beside other programs that made a step
ten times as long as one thread does, or more threads than CPUs.
"""
_MORE_CPU: Final = "end or move the other programs on this node, or give the job more cores"
_FEWER_WORKERS: Final = "use fewer loader workers (num_workers)"
_LESS_LOADING: Final = "do less for each sample in __getitem__, or do it once, before the training"
# On a node with much other load, one thread is measured as 1.0, two as 1.6 to 2.4.
_MORE_THREADS: Final = 0.6
_FAR_MORE: Final = 4
_MOSTLY: Final = 0.5
_MAX_QUEUED: Final = 0.99


class LoaderCounsel(Protocol):
    """Advises on loaders."""

    @property
    def cost(self) -> Callable[[], WorkerCost]:
        """Returns the cost of a loader's worker on this machine; called only if advice depends on it."""

    def advise(
        self, facts: LoaderFacts, step_seconds: float, data_seconds: float, *, on_device: bool
    ) -> LoaderAdvice | None:
        """Return the change of a rank's loader; None without advice."""


@dataclass(frozen=True, slots=True)
class RuleCounsel:
    """Advises by the rule on the figures that are given, and by nothing before them."""

    cost: Callable[[], WorkerCost] = lambda: UNMEASURED_COST

    def advise(
        self, facts: LoaderFacts, step_seconds: float, data_seconds: float, *, on_device: bool
    ) -> LoaderAdvice | None:
        """Return what the rule advises; see :func:`~torchperfd_daemon.loader_workers.advise_loader`."""
        return advise_loader(facts, step_seconds, data_seconds, self.cost(), on_device=on_device)


UNMEASURED: Final = RuleCounsel()
"""Of a machine without a measurement."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that shortens the step.

    Attributes:
        fix: What to do, the code to write first; empty if none is known.
        saves_seconds: Its predicted saving per step; 0 without a prediction.
        cause: What the evidence for it shows, where that is more precise than what was found; None otherwise.
    """

    fix: str = ""
    saves_seconds: float = 0.0
    cause: Cause | None = None


def stage_words(facts: LoaderFacts | None) -> str:
    """Return what the stages of making a batch take, to append to the evidence; empty if unknown."""
    words = facts.stages.words if facts is not None and facts.stages is not None else ""
    return f"; {words}" if words else ""


def loader_remedy(
    facts: LoaderFacts | None,
    step_seconds: float,
    data_seconds: float,
    counsel: LoaderCounsel = UNMEASURED,
    *,
    most_seconds: float = math.inf,
    on_device: bool = False,
    ranks: int = 1,
    binding: CpuBinding = UNBOUND,
) -> Remedy:
    """Return the remedy for a wait for the loader; an empty one if none but the usual one is known.

    Args:
        data_seconds: The part of the step in which it waits for the loader.
        most_seconds: The cost of the wait in the evidence; the promised saving is at most this.
        ranks: How many the job has; the usual remedy, ``tune``, measures jobs of one.
        binding: To how many CPUs the process is bound, if these are fewer than its share.
    """
    usual = Remedy(_LESS_LOADING if ranks > 1 else "")
    if binding.allowed and _lacks_cpus(facts):
        return Remedy(binding_fix(binding), cause=Cause.CPU_AFFINITY)
    if facts is None:
        return usual
    if facts.slow_worker is not None:
        return Remedy(
            f"worker {facts.slow_worker} is slow, and finished batches of the others wait for it: give each"
            " worker as much work, such as shards of equal cost, or DataLoader(..., in_order=False)",
            cause=Cause.SLOW_WORKER,
        )
    advice = counsel.advise(facts, step_seconds, data_seconds, on_device=on_device)
    if advice is not None:
        remedy = advised_remedy(advice, most_seconds)
        is_overhead = facts.workers and facts.costs_more_to_hand_over and advice.workers == 0
        return replace(remedy, cause=Cause.WORKER_OVERHEAD) if is_overhead else remedy
    if is_cheap(facts, data_seconds, counsel.cost()):
        words = "these are cheap to make, and worker processes would cost more than they save"
        return Remedy(f"fewer, larger batches: {words}")
    return usual


def advised_remedy(advice: LoaderAdvice, most_seconds: float = math.inf) -> Remedy:
    """Return the remedy that some advice is, with a promised saving of at most so much."""
    remark = f" ({advice.assumes})" if advice.assumes else ""
    return Remedy(f"{advice.setting}{remark}", min(advice.saves_seconds, most_seconds))


def is_usual(fix: str) -> bool:
    """Return whether the fix of a wait for the loader is the one for want of a better one."""
    return fix in ("", _LESS_LOADING)


def computing_threads(facts: LoaderFacts | None, threads: int | None) -> float | None:
    """Return how many of a rank's threads compute or want to; None if unknown.

    On average between draws, these are its CPU time, divided by the share of its runnable time for which the
    training thread had a CPU: a thread without a CPU uses no CPU time. Operations use no more than their
    ``threads``.
    """
    if facts is None or facts.rest_cpus is None or facts.queued is None:
        return threads
    running = facts.rest_cpus / (1 - min(facts.queued, _MAX_QUEUED))
    return running if threads is None else min(running, threads)


def contention_remedy(
    facts: LoaderFacts | None,
    threads: int | None = None,
    *,
    cpus: float | None = None,
    binding: CpuBinding = UNBOUND,
    on_device: bool = False,
    ranks: int = 1,
) -> Remedy:
    """Return the remedy for a lack of CPUs, with a number of threads if the rank's own exceed its CPUs.

    It has no advice that cannot help: fewer threads than one, fewer workers than none or than compete, or
    measurements by ``tune``, which measures jobs of one rank without an accelerator.

    Args:
        threads: How many threads an operation may use; None if unknown.
        cpus: How many CPUs the process may use, of a rank without a loader; None if unknown.
    """
    cpus = (facts.cpus if facts is not None else None) or cpus
    setting = _fewer_threads(facts, threads, cpus)
    bound = binding_fix(binding) if binding.allowed else ""
    measure = "" if on_device or ranks > 1 or threads == 1 else TUNE_THREADS
    fewer = _FEWER_WORKERS if facts is not None and _crowd_each_other(facts) else ""
    fix = "; or ".join(filter(None, (bound, setting, measure, fewer, _MORE_CPU)))
    cause = Cause.CPU_AFFINITY if bound else Cause.TOO_MANY_THREADS if setting else None
    return Remedy(fix, cause=cause)


def without_fewer_workers(fix: str) -> str:
    """Return a remedy for a lack of CPUs without the advice to use fewer workers."""
    return fix.replace(f"{_FEWER_WORKERS}; or ", "")


def binding_fix(binding: CpuBinding) -> str:
    """Return what to do about a process that is bound to fewer CPUs than its share."""
    count = "CPU" if binding.allowed == 1 else "CPUs"
    return (
        f"undo the CPU affinity: this process and its workers may use {binding.allowed} {count} of"
        f" {binding.share}; `taskset -acp 0-{binding.share - 1} PID` while it runs, or"
        " os.sched_setaffinity(0, …) after the imports, as a library, numactl or the launcher has bound it"
    )


def _lacks_cpus(facts: LoaderFacts | None) -> bool:
    """Return whether a loader computes on CPUs that it has not enough of, or may do so."""
    if facts is None:
        return False
    if facts.workers:
        queued = facts.worker_queued
        return queued is None or queued >= CROWDED
    return facts.draw_cpu is None or facts.draw_cpu >= _MOSTLY


def _crowd_each_other(facts: LoaderFacts) -> bool:
    """Return whether workers compete for CPUs with each other and with the training thread.

    Fewer of them do not help if there is one, if they mostly wait, or if each has a CPU.
    """
    if facts.workers < 2 or facts.idle >= _MOSTLY:
        return False
    if facts.cpus and facts.workers + 1 <= facts.cpus:
        return False
    return facts.worker_queued is None or facts.worker_queued >= CROWDED


def _fewer_threads(facts: LoaderFacts | None, threads: int | None, cpus: float | None) -> str:
    """Return the setting of threads for a rank that has more than its CPUs; empty where it is not certain."""
    computing = computing_threads(facts, threads)
    if not cpus or computing is None:
        return ""
    fitting = max(1, int(cpus))
    rest = facts.rest_cpus if facts is not None else None
    is_alone = rest is not None and rest >= OWN_SHARE * cpus
    # Far more threads than CPUs wait for each other, whatever else runs on the node.
    is_far_more = threads is not None and computing >= _FAR_MORE * fitting
    too_many = max(fitting, cpus) + _MORE_THREADS
    # Threads that compute in bursts use little CPU on average, and are in each other's way nevertheless.
    in_bursts = (
        threads is not None and threads >= too_many and facts is not None and (facts.queued or 0) >= CROWDED
    )
    if (not in_bursts and computing < too_many) or not (fitting == 1 or is_alone or is_far_more):
        return ""
    if threads is None:
        return f"OMP_NUM_THREADS={fitting} (now about {computing:.0f} threads compute in each rank)"
    return f"torch.set_num_threads({fitting}) (now {threads})"


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
