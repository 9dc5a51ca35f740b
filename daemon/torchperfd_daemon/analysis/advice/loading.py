"""Rules on the loading of batches: workers, whole batches, and pinned memory."""

from collections.abc import Iterator
from typing import Final

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.context import DRAW, AdviceContext
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.loader_workers import LoaderFacts, advise_loader

_IN_PROCESS: Final = "_SingleProcessDataLoaderIter"
# The time to take over a batch that a worker has ready.
_HAND_OVER_NS: Final = 1_000_000
_PAGEABLE: Final = "Memcpy HtoD (Pageable"
# By which factor pinned memory is copied faster, by the first number of the GPU's compute capability. The
# host copies pageable memory first, with 6 GB/s on an H200; pinned memory is as fast as PCIe 3, 4 or 5.
_PINNED_SPEED: Final = ((9, 8), (8, 4), (0, 2))


def loader_workers(context: AdviceContext) -> Iterator[Finding]:
    """Batches are made while the step waits, and could be made during the step before, or at less cost.

    `advise_loader` computes the change and its saving, as for the live verdict. It reads the client's data
    in the trace on unrecorded steps. A trace without them shows only the wait, and not the number of workers:
    they now deliver one batch a step, and twice as many deliver two. Taking over a finished batch is not
    waiting.
    """
    draws = context.annotated(DRAW)
    waited = context.lasted(draws)
    if not len(draws) or waited <= 0:
        return
    trace = context.trace
    in_process = any(_IN_PROCESS in trace.names[name] for name in set(trace.name[draws.row].tolist()))
    facts, step_ns = trace.loader, context.step_ns
    unrecorded = trace.unrecorded_phase_ns.get("data", 0.0)
    if facts is not None and in_process is not (facts.workers == 0):
        facts = None  # the newest sample was of another loader
    if facts is not None and 0 < unrecorded <= trace.unrecorded_step_ns:
        waited, step_ns = unrecorded, float(trace.unrecorded_step_ns)
    elif facts is None and not in_process:
        if trace.loader is None:
            yield from _twice_the_workers(context, waited, len(draws))
        return
    else:
        facts = facts or LoaderFacts(batches_per_step=len(draws) / context.count)
        waited = min(waited, unrecorded or waited)
    advice = advise_loader(
        facts, step_ns / 1e9, waited / 1e9, context.worker_cost(), on_device=context.on_device
    )
    if advice is None:
        return
    share = f"{ns_text(waited)} of each step of {ns_text(step_ns)} ({waited / step_ns:.0%})"
    evidence = (
        f"the training process makes its batches itself: {share}"
        if in_process
        else f"the training process waits for its {facts.workers} DataLoader workers: {share}"
    )
    yield Finding(
        advice.rule,
        f"{evidence}; {advice.assumes}" if advice.assumes else evidence,
        advice.saves_seconds * 1e9,
        advice.change,
        advice.setting,
        # Figures of unrecorded steps need no correction for recording.
        waits=trace.loader is facts,
    )


def _twice_the_workers(context: AdviceContext, waited: float, draws: int) -> Iterator[Finding]:
    """Advise on workers if only the wait for them is known."""
    waited -= _HAND_OVER_NS * draws / context.count
    yield Finding(
        "loader-workers",
        f"each step of {ns_text(context.step_ns)} waits {ns_text(waited)} ({waited / context.step_ns:.0%})"
        " for the DataLoader's workers; assumes free CPUs, or workers that wait rather than compute",
        min(waited, context.step_ns / 2),
        "use twice as many workers, or make an item cheaper to read and to transform",
        "DataLoader(..., num_workers=2 * num_workers, persistent_workers=True, prefetch_factor=4)",
        waits=True,
    )


def pin_memory(context: AdviceContext) -> Iterator[Finding]:
    """Copies to the device come from pageable memory: the host stages them, and nothing overlaps them.

    The saving is the idle time charged to them, and the part of their own exposed time by which pinned
    memory is faster.
    """
    copies = context.device_rows[context.named(_PAGEABLE)[context.device_rows]]
    if not len(copies):
        return
    trace = context.trace
    taken = int((trace.end[copies] - trace.start[copies]).sum())
    exposed = min(taken, sum(each.exposed_memcpy_ns for each in context.breakdowns))
    idle = context.idle_for("pageable_copy")
    speed = next(factor for least, factor in _PINNED_SPEED if trace.device_generation >= least)
    yield Finding(
        "pin-memory",
        f"{len(copies) / context.count:,.0f} copies {context.a_step} come from pageable memory: "
        f"{ns_text(context.per_step(taken))}, {ns_text(context.per_step(exposed))} of it while nothing"
        f" else runs, and {ns_text(idle)} idle",
        idle + context.per_step(exposed * (1 - 1 / speed)),
        "copy from pinned memory, without waiting for the copy",
        'DataLoader(..., pin_memory=True); batch.to("cuda", non_blocking=True)',
    )
