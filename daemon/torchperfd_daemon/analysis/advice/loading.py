"""Rules on the loading of batches: workers, whole batches, and pinned memory."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration, ns_text
from torchperfd.model.loader_workers import LoaderFacts, advise_loader
from torchperfd.model.settled_advice import SettledAdvice
from torchperfd_daemon.analysis.advice.context import DRAW, AdviceContext, Spans
from torchperfd_daemon.analysis.advice.replay import DeviceWork, Edit, HostTime
from torchperfd_daemon.analysis.advice.rules import IDLE_KNOWN, ON_DEVICE, REPEATS, Finding, Rule
from torchperfd_daemon.analysis.trace import Int64

_IN_PROCESS: Final = "_SingleProcessDataLoaderIter"
# A rank that waits for a smaller part of the time than the run's advice is on has another loader, or none.
_LIKE_ITS_RANK: Final = 0.5
# The time to take over a batch that a worker has ready.
_HAND_OVER_NS: Final = 1_000_000
# What a call to copy takes if the host does not stage it.
_LAUNCH_NS: Final = 10_000
_FROM_PAGEABLE: Final = "HtoD (Pageable"
_TO_PAGEABLE: Final = "-> Pageable)"
# By which factor pinned memory is copied faster, by the first number of the GPU's compute capability. The
# host copies pageable memory first, with 6 GB/s on an H200; pinned memory is as fast as PCIe 3, 4 or 5.
_PINNED_SPEED: Final = ((9, 8), (8, 4), (0, 2))


def loader_workers(context: AdviceContext) -> Iterator[Finding]:
    """Batches are made while the step waits, and could be made during the step before, or at less cost.

    `advise_loader` computes the change and its saving, as for the live verdict. It reads the client's data
    in the trace on unrecorded steps. A trace without them shows only the wait, and not the number of workers:
    they now deliver one batch a step, and twice as many deliver two. Taking over a finished batch is not
    waiting.

    What the run was advised is repeated instead: a trace of a few steps has no better figures.
    """
    draws = context.annotated(DRAW)
    waited = context.lasted(draws)
    if not len(draws) or waited <= 0:
        return
    trace = context.trace
    in_process = any(_IN_PROCESS in trace.names[name] for name in set(trace.name[draws.row].tolist()))
    facts, step_ns = trace.loader, context.step_ns
    unrecorded = trace.unrecorded_phase_ns.get("data", 0.0)
    if context.loader_advice is not None:
        yield from _settled(context, context.loader_advice, draws, min(unrecorded or waited, step_ns))
        return
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
        # Figures of unrecorded steps need no correction for recording.
        context.without_host(
            advice.saves_seconds * 1e9, draws, of=waited, recorded=trace.loader is not facts
        ),
        advice.change,
        advice.setting,
    )


def _settled(
    context: AdviceContext, settled: SettledAdvice, draws: Spans, waited: float
) -> Iterator[Finding]:
    """Repeat what the run was advised, for a rank that waits as the one does that the advice is on."""
    advice = settled.advice
    if advice is None or waited / 1e9 < _LIKE_ITS_RANK * settled.data_seconds:
        return
    share = settled.data_seconds / settled.step_seconds
    waits = f"{duration(settled.data_seconds)} of each step of {duration(settled.step_seconds)} ({share:.0%})"
    evidence = (
        f"the training process waits for its {settled.workers_now} DataLoader workers: {waits}"
        if settled.workers_now
        else f"the training process makes its batches itself: {waits}"
    )
    yield Finding(
        advice.rule,
        f"{evidence}, as the run was observed" + (f"; {advice.assumes}" if advice.assumes else ""),
        context.without_host(advice.saves_seconds * 1e9, draws, of=waited, recorded=False),
        advice.change,
        advice.setting,
        settled_ns=advice.saves_seconds * 1e9,
    )


def _twice_the_workers(context: AdviceContext, waited: float, draws: int) -> Iterator[Finding]:
    """Advise on workers if only the wait for them is known."""
    waited -= _HAND_OVER_NS * draws / context.count
    yield Finding(
        "loader-workers",
        f"each step of {ns_text(context.step_ns)} waits {ns_text(waited)} ({waited / context.step_ns:.0%})"
        " for the DataLoader's workers; assumes free CPUs, or workers that wait rather than compute",
        context.without_host(min(waited, context.step_ns / 2), context.annotated(DRAW), recorded=False),
        "use twice as many workers, or make an item cheaper to read and to transform",
        "DataLoader(..., num_workers=2 * num_workers, persistent_workers=True, prefetch_factor=4)",
    )


def pin_memory(context: AdviceContext) -> Iterator[Finding]:
    """Copies to the device come from pageable memory: the host stages them, and nothing overlaps them.

    The edit makes the copies faster, and the host neither stages them nor waits for them.
    """
    copies = _copies(context, _FROM_PAGEABLE)
    if not len(copies):
        return
    exposed = _exposed(context, copies)
    idle = context.idle_for("pageable_copy")
    every = context.trace.named(context.all_device_rows, lambda text: _FROM_PAGEABLE in text)
    staging = context.spans_of(context.calls_of(every))
    staged = max(int((staging.end - staging.start).sum()), 1)
    device = context.run.device_type.quoted
    loads = len(context.annotated(DRAW)) > 0
    yield Finding(
        "pin-memory",
        f"{_described(context, copies, 'come from', exposed)}, and {ns_text(idle)} idle",
        Edit(
            host=(HostTime(staging.start, staging.end, min(_LAUNCH_NS * len(staging) / staged, 1.0)),),
            waits=(staging.row,),
            device=(DeviceWork(every, 1 / _speed(context)),),
        ),
        "copy from pinned memory, without waiting for the copy",
        f"DataLoader(..., pin_memory=True); batch.to({device}, non_blocking=True)"
        if loads
        else f"batch.pin_memory().to({device}, non_blocking=True)",
    )


def pin_results(context: AdviceContext) -> Iterator[Finding]:
    """Copies from the device go to pageable memory while nothing else runs on it.

    The edit makes the copies faster. The host's wait for them is that of needless-synchronisation.
    """
    copies = _copies(context, _TO_PAGEABLE)
    if not len(copies):
        return
    exposed = _exposed(context, copies)
    every = context.trace.named(context.all_device_rows, lambda text: _TO_PAGEABLE in text)
    yield Finding(
        "pin-results",
        _described(context, copies, "go to", exposed),
        Edit(device=(DeviceWork(every, 1 / _speed(context)),)),
        "copy to pinned memory that is kept, and wait for the copy only where the values are read",
        "host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True); host.copy_(x, non_blocking=True)",
    )


def _copies(context: AdviceContext, name: str) -> Int64:
    """Return the copies in the steps that have these words in their names."""
    rows = context.device_rows
    return context.trace.named(rows, lambda text: name in text)


def _exposed(context: AdviceContext, copies: Int64) -> float:
    """Return the time of a step in which these copies ran and nothing else, in ns."""
    return context.exposed(copies, np.setdiff1d(context.device_rows, copies, assume_unique=True))


def _described(context: AdviceContext, copies: Int64, direction: str, exposed: float) -> str:
    taken = int((context.trace.end[copies] - context.trace.start[copies]).sum())
    return (
        f"{len(copies) / context.count:,.0f} copies {context.a_step} {direction} pageable memory: "
        f"{ns_text(context.per_step(taken))}, {ns_text(exposed)} of it while nothing else runs"
    )


def _speed(context: AdviceContext) -> int:
    return next(factor for least, factor in _PINNED_SPEED if context.trace.device_generation >= least)


RULES: Final = (
    Rule("loader-workers", loader_workers, (REPEATS, IDLE_KNOWN)),
    Rule("pin-memory", pin_memory, (ON_DEVICE, IDLE_KNOWN)),
    Rule("pin-results", pin_results, (ON_DEVICE, IDLE_KNOWN)),
)
