"""Rules on how batches come to the model: by workers, in whole batches, and from pinned memory."""

from collections.abc import Iterator
from typing import Final

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.advice.scene import DRAW, Scene
from torchperfd_daemon.loader_workers import LoaderFacts, advise_loader

_IN_PROCESS: Final = "_SingleProcessDataLoaderIter"
# To take over a batch that a worker has ready takes so long in any case.
_HAND_OVER_NS: Final = 1_000_000
_PAGEABLE: Final = "Memcpy HtoD (Pageable"
# Pinned memory is copied at least this much faster.
_PINNED_SPEED: Final = 2


def loader_workers(scene: Scene) -> Iterator[Finding]:
    """Batches are made while the step waits, and could be made during the step before, or at less cost.

    What changes that, and what it saves, `advise_loader` says, as it does for the live verdict. It reads what
    the client has written into the trace about steps that nothing records. Of another trace it has the wait
    alone; where that has workers their number is not on record: they now deliver one batch a step, and twice
    as many deliver two. To take over a batch that is ready is no waiting.
    """
    draws = scene.annotated(DRAW)
    waited = scene.lasted(draws)
    if not len(draws) or waited <= 0:
        return
    trace = scene.trace
    in_process = any(_IN_PROCESS in trace.names[name] for name in set(trace.name[draws.row].tolist()))
    facts, step_ns = trace.loader, scene.step_ns
    unrecorded = trace.unrecorded_phase_ns.get("data", 0.0)
    if facts is not None and in_process is not (facts.workers == 0):
        facts = None  # the newest sample was of another loader
    if facts is not None and 0 < unrecorded <= trace.unrecorded_step_ns:
        waited, step_ns = unrecorded, float(trace.unrecorded_step_ns)
    elif facts is None and not in_process:
        if trace.loader is None:
            yield from _twice_the_workers(scene, waited, len(draws))
        return
    else:
        facts = facts or LoaderFacts(batches_per_step=len(draws) / scene.count)
        waited = min(waited, unrecorded or waited)
    advice = advise_loader(facts, step_ns / 1e9, waited / 1e9, scene.worker_cost(), on_device=scene.on_device)
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
        # Figures of steps that nothing recorded are not to be corrected for recording.
        waits=trace.loader is facts,
    )


def _twice_the_workers(scene: Scene, waited: float, draws: int) -> Iterator[Finding]:
    """Advise on workers of which nothing is known but how long they are waited for."""
    waited -= _HAND_OVER_NS * draws / scene.count
    yield Finding(
        "loader-workers",
        f"each step of {ns_text(scene.step_ns)} waits {ns_text(waited)} ({waited / scene.step_ns:.0%}) for"
        " the DataLoader's workers; assumes free CPUs, or workers that wait rather than compute",
        min(waited, scene.step_ns / 2),
        "use twice as many workers, or make an item cheaper to read and to transform",
        "DataLoader(..., num_workers=2 * num_workers, persistent_workers=True, prefetch_factor=4)",
        waits=True,
    )


def pin_memory(scene: Scene) -> Iterator[Finding]:
    """Copies to the device come from pageable memory: the host stages them, and nothing overlaps them.

    What is saved is the idle time charged to them, and of the time they take themselves, as far as nothing
    else ran, the part by which pinned memory is faster.
    """
    copies = scene.device_rows[scene.named(_PAGEABLE)[scene.device_rows]]
    if not len(copies):
        return
    trace = scene.trace
    taken = int((trace.end[copies] - trace.start[copies]).sum())
    exposed = min(taken, sum(each.exposed_memcpy_ns for each in scene.breakdowns))
    idle = scene.idle_for("pageable_copy")
    yield Finding(
        "pin-memory",
        f"{len(copies) / scene.count:,.0f} copies {scene.a_step} come from pageable memory: "
        f"{ns_text(scene.per_step(taken))}, {ns_text(scene.per_step(exposed))} of it while nothing"
        f" else runs, and {ns_text(idle)} idle",
        idle + scene.per_step(exposed * (1 - 1 / _PINNED_SPEED)),
        "copy from pinned memory, without waiting for the copy",
        'DataLoader(..., pin_memory=True); batch.to("cuda", non_blocking=True)',
    )
