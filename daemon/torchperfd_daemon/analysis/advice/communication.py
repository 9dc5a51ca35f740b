"""Rules for several devices: their exposed communication, and the means of communication."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.advice.scene import Scene
from torchperfd_daemon.analysis.advice.updating import STEP
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Int64

_DDP_FORWARD: Final = "DistributedDataParallel.forward"
_GLOO: Final = "gloo:"
# The operators that wait for a collective, or contain it, are no computation beside it.
_COMMUNICATE: Final = ("c10d::", "gloo:", "record_param_comms", "nccl:")
_REDUCE: Final = ("c10d::allreduce_", "gloo:all_reduce", "nccl:all_reduce")
# What DDP copies into its buckets, and back out of them when they have been exchanged.
_FILL: Final = "torch::distributed::reducer::"
_EMPTY: Final = "torch.distributed.ddp.reducer::"
_START: Final = "c10d::allreduce_"
# What DDP does with a module's buffers ahead of the module's forward, where the backward before it exchanged.
_BROADCAST: Final = "c10d::broadcast_"
_SEND_BUFFERS: Final = (
    *(_BROADCAST, "aten::flatten_dense_tensors", "aten::unflatten_dense_tensors", "aten::copy_"),
)
_PARALLEL: Final = "DataParallel.forward"
_REPLICATE: Final = ("Broadcast", "Scatter", "Gather", "ReduceAddCoalesced", "aten::_broadcast_coalesced")
# NCCL moves a tensor between devices at least this much faster than gloo does by way of the host.
_NCCL_SPEED: Final = 2
# A hook that sends half precision sends half of the bytes.
_COMPRESSED: Final = 2


def gradient_exchange(scene: Scene) -> Iterator[Finding]:
    """Gradients are exchanged while nothing is computed.

    Where gradients are exchanged after k > 1 of DDP's forwards for one step of the optimizer, all exchanges
    but the last are needless: (k - 1) / k of the exposed time is saved. On the CPU also of what DDP takes to
    fill and empty its buckets and to send the module's buffers, and of what computing beside an exchange,
    which takes cores and memory bandwidth, lasts longer than the same operators alone. Elsewhere the bytes
    can be halved.
    """
    exposed = _exposed(scene)
    if not exposed:
        return
    exchanges, updates = _exchanges(scene), len(scene.annotated(STEP))
    evidence = f"{ns_text(exposed)} of {scene.each_step} are communication with nothing beside it"
    if updates and exchanges >= 2 * updates:
        rounds = exchanges / updates
        yield Finding(
            "gradient-accumulation",
            f"{evidence}, for {rounds:.0f} exchanges of gradients before one step of the optimizer",
            (exposed + _on_the_host(scene)) * (1 - 1 / rounds),
            "exchange gradients only after the last of the accumulated backward passes",
            "with model.no_sync(): loss.backward()  # for all micro-batches but the last",
            waits=True,
        )
        return
    if not scene.on_device:
        return
    yield Finding(
        "exposed-communication",
        evidence,
        exposed * (1 - 1 / _COMPRESSED),
        "send gradients in half precision, and in buckets that overlap with backward",
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook); DDP(..., bucket_cap_mb=25)",
    )


def backend(scene: Scene) -> Iterator[Finding]:
    """Tensors of a device are exchanged by gloo, which takes them through the host's memory."""
    spans = scene.annotated(_GLOO)
    if not scene.on_device or not len(spans):
        return
    trace = scene.trace
    busy = Cover(trace.start[scene.device_rows], trace.end[scene.device_rows])
    exchange = Cover(spans.start, spans.end)
    alone = scene.per_step((exchange | busy).length - busy.length)
    yield Finding(
        "backend",
        f"gloo exchanges tensors beside a device: {ns_text(alone)} of {scene.each_step} in which "
        "the device does nothing",
        alone * (1 - 1 / _NCCL_SPEED),
        "exchange device tensors with NCCL",
        'torch.distributed.init_process_group("nccl")',
        of_idle=True,
    )


def data_parallel(scene: Scene) -> Iterator[Finding]:
    """One process drives several devices: every step copies the model to all and gathers from all."""
    if not len(scene.annotated(_PARALLEL)):
        return
    trace = scene.trace
    rows = scene.calls.row[scene.named(*_REPLICATE)[scene.calls.row]]
    host = Cover(trace.start[rows], trace.end[rows])
    copying = scene.per_step(host.length)
    yield Finding(
        "data-parallel",
        f"DataParallel spends {ns_text(copying)} of {scene.each_step} on copying the model and on gathering",
        copying,
        "run one process for each device",
        "DistributedDataParallel(model, device_ids=[local_rank]); torchrun --nproc-per-node=gpu train.py",
    )


def _exchanges(scene: Scene) -> int:
    """Return after how many of DDP's forwards gradients were exchanged before the next one."""
    forwards, reductions = scene.annotated(_DDP_FORWARD), scene.annotated(*_REDUCE)
    after = np.searchsorted(forwards.start, reductions.start, side="right")
    return len(np.unique(after[after > 0]))


def _on_the_host(scene: Scene) -> float:
    """Return what exchanges cost the computing threads of a CPU in a step, beside the waiting for them."""
    if scene.on_device:
        return 0.0
    trace, calls = scene.trace, scene.calls
    # What starts an exchange in no other operator is not taken for computing, so `_exposed` has it.
    chosen = scene.named(_FILL, _EMPTY)[calls.row] | (scene.named(_START)[calls.row] & (calls.depth > 0))
    rows = calls.row[chosen]
    handling = Cover(trace.start[rows], trace.end[rows]) | _sending_buffers(scene)
    exchanging, computed = _exchanging(scene)
    either = exchanging | computed
    # What is exposed is counted already: left are its operators, and the time of neither.
    operators = handling.length + computed.length - (handling | computed).length
    between = (handling | either).length - either.length
    return scene.per_step(operators + between) + _slowed(scene, handling)


def _sending_buffers(scene: Scene) -> Cover:
    """Return when DDP sends its module's buffers: from its forward's begin to the module's first operator."""
    forwards, rows = scene.annotated(_DDP_FORWARD), scene.outer.row
    rows = rows[scene.during(rows, forwards)]
    rows = rows[np.argsort(scene.trace.start[rows], kind="stable")]
    starts = scene.trace.start[rows]
    sent, own = starts[scene.named(_BROADCAST)[rows]], starts[~scene.named(*_SEND_BUFFERS)[rows]]
    ends = np.minimum(_next(own, forwards.start), forwards.end)
    sends = _next(sent, forwards.start) < ends
    return Cover(forwards.start[sends], ends[sends])


def _next(moments: Int64, after: Int64) -> Int64:
    """Return the first of some ordered moments at or after each of others; the last of all where none is."""
    found: Int64 = np.append(moments, np.iinfo(np.int64).max)[np.searchsorted(moments, after)]
    return found


def _slowed(scene: Scene, handling: Cover) -> float:
    """Return how much longer the operators beside an exchange take in a step than the same ones alone do.

    The same are those of one name on inputs of one shape; without shapes nothing can be said. Operators that
    never run alone count for nothing, and those within ``handling`` are counted already.
    """
    trace, calls = scene.trace, scene.calls
    if len(trace.shapes) <= 1:
        return 0.0
    starts, ends = trace.start[calls.row], trace.end[calls.row]
    computing = ~scene.named(*_COMMUNICATE)[calls.row]
    computing &= handling.up_to(ends) - handling.up_to(starts) < ends - starts
    rows, own = calls.row[computing], (calls.work_ns + calls.overhead_ns)[computing]
    spans = scene.annotated(_GLOO)
    exchange = Cover(spans.start, spans.end)
    beside = exchange.up_to(trace.end[rows]) > exchange.up_to(trace.start[rows])
    groups, kind = np.unique(scene.kinds(rows), return_inverse=True)
    (times_beside, sum_beside), (times_alone, sum_alone) = (
        (
            np.bincount(kind[each], minlength=len(groups)),
            np.bincount(kind[each], weights=own[each], minlength=len(groups)),
        )
        for each in (beside, ~beside)
    )
    known = (times_beside > 0) & (times_alone > 0)
    expected = times_beside[known] * sum_alone[known] / times_alone[known]
    return max(scene.per_step(float((sum_beside[known] - expected).sum())), 0.0)


def _exposed(scene: Scene) -> float:
    """Return the time of a step in which there is communication and no computation."""
    if scene.on_device and any(each.comm_ns for each in scene.breakdowns):
        return scene.per_step(sum(each.exposed_comm_ns for each in scene.breakdowns))
    if scene.on_device or not len(scene.annotated(_GLOO)):
        return 0.0
    exchanging, computed = _exchanging(scene)
    return scene.per_step((exchanging | computed).length - computed.length)


def _exchanging(scene: Scene) -> tuple[Cover, Cover]:
    """Return when a CPU's rank exchanges, or waits for that, and when it computes.

    The waiting begins before a communicating thread shows that it is at work, and ends after: all
    the time without computation before DDP empties a bucket is waiting for that bucket.
    """
    trace, rows = scene.trace, scene.outer.row
    rows = rows[~scene.named(*_COMMUNICATE)[rows]]
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    starts, ends = trace.start[rows], trace.end[rows]
    emptying = np.flatnonzero(scene.named(_EMPTY)[rows[1:]]) + 1
    since = np.minimum(np.maximum.accumulate(ends)[emptying - 1], starts[emptying])
    spans = scene.annotated(_GLOO)
    return Cover(spans.start, spans.end) | Cover(since, starts[emptying]), Cover(starts, ends)
