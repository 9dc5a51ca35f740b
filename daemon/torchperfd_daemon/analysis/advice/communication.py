"""Rules for several devices: their exposed communication, and the means of communication."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.advice.updating import STEP
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Int64

_DDP_FORWARD: Final = "DistributedDataParallel.forward"
_GLOO: Final = "gloo:"
# Operators that wait for a collective, or contain it, are not computation beside it.
_COMMUNICATE: Final = ("c10d::", "gloo:", "record_param_comms", "nccl:")
_REDUCE: Final = ("c10d::allreduce_", "gloo:all_reduce", "nccl:all_reduce")
# DDP's copies into its buckets, and out of them after the exchange.
_FILL: Final = "torch::distributed::reducer::"
_EMPTY: Final = "torch.distributed.ddp.reducer::"
_START: Final = "c10d::allreduce_"
# DDP's work on a module's buffers before the module's forward, if the backward before it exchanged gradients.
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


def gradient_exchange(context: AdviceContext) -> Iterator[Finding]:
    """Gradients are exchanged while nothing is computed.

    If gradients are exchanged after each of k > 1 forwards per optimizer step, all exchanges but the last are
    needless: (k - 1) / k of the exposed time is saved. On the CPU, the same share is saved of two more costs:
    DDP fills and empties its buckets and sends the module's buffers; and operators beside an exchange take
    longer, because it uses cores and memory bandwidth. If k is 1, a device can exchange half the bytes.
    """
    exposed = _exposed(context)
    if not exposed:
        return
    exchanges, updates = _exchanges(context), len(context.annotated(STEP))
    evidence = f"{ns_text(exposed)} of {context.each_step} are communication with nothing beside it"
    if updates and exchanges >= 2 * updates:
        rounds = exchanges / updates
        yield Finding(
            "gradient-accumulation",
            f"{evidence}, for {rounds:.0f} exchanges of gradients before one step of the optimizer",
            (exposed + _on_the_host(context)) * (1 - 1 / rounds),
            "exchange gradients only after the last of the accumulated backward passes",
            "with model.no_sync(): loss.backward()  # for all micro-batches but the last",
            waits=True,
        )
        return
    if not context.on_device:
        return
    yield Finding(
        "exposed-communication",
        evidence,
        exposed * (1 - 1 / _COMPRESSED),
        "send gradients in half precision, and in buckets that overlap with backward",
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook); DDP(..., bucket_cap_mb=25)",
    )


def backend(context: AdviceContext) -> Iterator[Finding]:
    """Tensors of a device are exchanged by gloo, which takes them through the host's memory."""
    spans = context.annotated(_GLOO)
    if not context.on_device or not len(spans):
        return
    trace = context.trace
    busy = Cover(trace.start[context.device_rows], trace.end[context.device_rows])
    exchange = Cover(spans.start, spans.end)
    alone = context.per_step((exchange | busy).length - busy.length)
    yield Finding(
        "backend",
        f"gloo exchanges tensors beside a device: {ns_text(alone)} of {context.each_step} in which "
        "the device does nothing",
        alone * (1 - 1 / _NCCL_SPEED),
        "exchange device tensors with NCCL",
        'torch.distributed.init_process_group("nccl")',
        of_idle=True,
    )


def data_parallel(context: AdviceContext) -> Iterator[Finding]:
    """One process drives several devices: every step copies the model to all and gathers from all."""
    if not len(context.annotated(_PARALLEL)):
        return
    trace = context.trace
    rows = context.calls.row[context.named(*_REPLICATE)[context.calls.row]]
    host = Cover(trace.start[rows], trace.end[rows])
    copying = context.per_step(host.length)
    yield Finding(
        "data-parallel",
        f"DataParallel spends {ns_text(copying)} of {context.each_step} on copying the model"
        " and on gathering",
        copying,
        "run one process for each device",
        "DistributedDataParallel(model, device_ids=[local_rank]); torchrun --nproc-per-node=gpu train.py",
    )


def _exchanges(context: AdviceContext) -> int:
    """Return the number of DDP's forwards after which gradients were exchanged before the next one."""
    forwards, reductions = context.annotated(_DDP_FORWARD), context.annotated(*_REDUCE)
    after = np.searchsorted(forwards.start, reductions.start, side="right")
    return len(np.unique(after[after > 0]))


def _on_the_host(context: AdviceContext) -> float:
    """Return the cost of exchanges to a CPU's computing threads per step, in addition to waiting for them."""
    if context.on_device:
        return 0.0
    trace, calls = context.trace, context.calls
    # An operator that starts an exchange, outside any other, is not computing, so `_exposed` contains it.
    chosen = context.named(_FILL, _EMPTY)[calls.row] | (context.named(_START)[calls.row] & (calls.depth > 0))
    rows = calls.row[chosen]
    handling = Cover(trace.start[rows], trace.end[rows]) | _sending_buffers(context)
    exchanging, computed = _exchanging(context)
    either = exchanging | computed
    # Exposed time is counted already. What remains are these operators, and the gaps beside them.
    operators = handling.length + computed.length - (handling | computed).length
    between = (handling | either).length - either.length
    return context.per_step(operators + between) + _slowed(context, handling)


def _sending_buffers(context: AdviceContext) -> Cover:
    """Return when DDP sends its module's buffers: from its forward's begin to the module's first operator."""
    forwards, rows = context.annotated(_DDP_FORWARD), context.outer.row
    rows = rows[context.during(rows, forwards)]
    rows = rows[np.argsort(context.trace.start[rows], kind="stable")]
    starts = context.trace.start[rows]
    sent, own = starts[context.named(_BROADCAST)[rows]], starts[~context.named(*_SEND_BUFFERS)[rows]]
    ends = np.minimum(_next(own, forwards.start), forwards.end)
    sends = _next(sent, forwards.start) < ends
    return Cover(forwards.start[sends], ends[sends])


def _next(moments: Int64, after: Int64) -> Int64:
    """Return the first of some ordered moments at or after each of others; the last of all where none is."""
    found: Int64 = np.append(moments, np.iinfo(np.int64).max)[np.searchsorted(moments, after)]
    return found


def _slowed(context: AdviceContext, handling: Cover) -> float:
    """Return how much longer the operators beside an exchange take in a step than the same ones alone do.

    Operators are the same if they have one name and inputs of one shape; without shapes the result is 0.
    Operators that never run alone do not count, and those within ``handling`` are counted already.
    """
    trace, calls = context.trace, context.calls
    if len(trace.shapes) <= 1:
        return 0.0
    starts, ends = trace.start[calls.row], trace.end[calls.row]
    computing = ~context.named(*_COMMUNICATE)[calls.row]
    computing &= handling.up_to(ends) - handling.up_to(starts) < ends - starts
    rows, own = calls.row[computing], (calls.work_ns + calls.overhead_ns)[computing]
    spans = context.annotated(_GLOO)
    exchange = Cover(spans.start, spans.end)
    beside = exchange.up_to(trace.end[rows]) > exchange.up_to(trace.start[rows])
    groups, kind = np.unique(context.kinds(rows), return_inverse=True)
    (times_beside, sum_beside), (times_alone, sum_alone) = (
        (
            np.bincount(kind[each], minlength=len(groups)),
            np.bincount(kind[each], weights=own[each], minlength=len(groups)),
        )
        for each in (beside, ~beside)
    )
    known = (times_beside > 0) & (times_alone > 0)
    expected = times_beside[known] * sum_alone[known] / times_alone[known]
    return max(context.per_step(float((sum_beside[known] - expected).sum())), 0.0)


def _exposed(context: AdviceContext) -> float:
    """Return the time of a step in which there is communication and no computation."""
    if context.on_device and any(each.comm_ns for each in context.breakdowns):
        return context.per_step(sum(each.exposed_comm_ns for each in context.breakdowns))
    if context.on_device or not len(context.annotated(_GLOO)):
        return 0.0
    exchanging, computed = _exchanging(context)
    return context.per_step((exchanging | computed).length - computed.length)


def _exchanging(context: AdviceContext) -> tuple[Cover, Cover]:
    """Return when a CPU's rank exchanges, or waits for an exchange, and when it computes.

    The waiting begins before a communicating thread shows that it is at work, and ends after: all
    the time without computation before DDP empties a bucket is waiting for that bucket.
    """
    trace, rows = context.trace, context.outer.row
    rows = rows[~context.named(*_COMMUNICATE)[rows]]
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    starts, ends = trace.start[rows], trace.end[rows]
    emptying = np.flatnonzero(context.named(_EMPTY)[rows[1:]]) + 1
    since = np.minimum(np.maximum.accumulate(ends)[emptying - 1], starts[emptying])
    spans = context.annotated(_GLOO)
    return Cover(spans.start, spans.end) | Cover(since, starts[emptying]), Cover(starts, ends)
