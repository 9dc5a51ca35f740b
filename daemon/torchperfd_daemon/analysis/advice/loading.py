"""Rules on how batches come to the model: by workers, and from pinned memory."""

import math
from collections.abc import Iterator
from typing import Final

from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.advice.scene import DRAW, Scene, ms

_IN_PROCESS: Final = "_SingleProcessDataLoaderIter"
# To take over a batch that a worker has ready takes so long in any case.
_HAND_OVER_NS: Final = 1_000_000
# More workers than this are not advised: what takes longer wants cheaper items.
_MOST_WORKERS: Final = 16
_PAGEABLE: Final = "Memcpy HtoD (Pageable"
# Pinned memory is copied at least this much faster.
_PINNED_SPEED: Final = 2


def loader_workers(scene: Scene) -> Iterator[Finding]:
    """Batches are made while the step waits, and could be made during the step before.

    With d the wait and c the rest of the step, w workers deliver a batch every d / w, so the step becomes
    max(c, d / w). Where there are workers already their number is not on record: they now deliver one batch
    a step, and twice as many deliver two. To take over a batch that is ready is no waiting.
    """
    draws = scene.annotated(DRAW)
    waited = scene.lasted(draws)
    if not len(draws) or waited <= 0:
        return
    rest = max(scene.step_ns - waited, 1.0)
    in_process = any(
        _IN_PROCESS in scene.trace.names[name] for name in set(scene.trace.name[draws.row].tolist())
    )
    share = waited / scene.step_ns
    if in_process:
        # One more than keeps up on average: batches do not come evenly.
        workers = min(math.ceil(waited / rest) + 1, _MOST_WORKERS)
        yield Finding(
            "loader-workers",
            f"the training process makes its batches itself: {ms(waited)} of each step of "
            f"{ms(scene.step_ns)} ({share:.0%})",
            scene.step_ns - max(rest, waited / workers),
            "let worker processes make the batches while the model trains",
            f"DataLoader(..., num_workers={workers}, persistent_workers=True"
            f"{', pin_memory=True' if scene.on_device else ''})",
        )
        return
    waited -= _HAND_OVER_NS * len(draws) / scene.count
    yield Finding(
        "loader-workers",
        f"each step of {ms(scene.step_ns)} waits {ms(waited)} ({share:.0%}) for the DataLoader's workers",
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
        f"{len(copies) / scene.count:,.0f} copies a step come from pageable memory: "
        f"{ms(scene.per_step(taken))}, {ms(scene.per_step(exposed))} of it while nothing else runs, and "
        f"{ms(idle)} idle",
        idle + scene.per_step(exposed * (1 - 1 / _PINNED_SPEED)),
        "copy from pinned memory, without waiting for the copy",
        'DataLoader(..., pin_memory=True); batch.to("cuda", non_blocking=True)',
    )
