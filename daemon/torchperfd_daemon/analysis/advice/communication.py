"""Rules for several devices: their exposed communication, and the means of communication."""

from collections.abc import Iterator, Sequence, Set
from typing import Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import DeviceWork, Edit, HostTime
from torchperfd_daemon.analysis.advice.exchanges import Exposed, exposed_exchanges
from torchperfd_daemon.analysis.advice.recording import kinds_of
from torchperfd_daemon.analysis.advice.rules import IDLE_KNOWN, ON_DEVICE, TRAINS, Condition, Finding, Rule
from torchperfd_daemon.analysis.categories import UPDATE
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
# So many exchanges of gradients for one step of the optimizer are accumulation.
_SEVERAL: Final = 2
_SHARDING: Final = ("all-gather", "reduce-scatter")
_ZERO_KINDS: Final = (*_SHARDING, "all-reduce", "broadcast")
_SINGLE: Final = "float32"
# Kinds that the evidence names.
_MAX_KINDS: Final = 3
# The functions that exchange, up to their last argument.
_CALLS: Final[dict[str, str]] = {
    "all-reduce": "torch.distributed.all_reduce(tensor",
    "all-gather": "torch.distributed.all_gather_into_tensor(output, tensor",
    "reduce-scatter": "torch.distributed.reduce_scatter_tensor(output, tensor",
    "all-to-all": "torch.distributed.all_to_all_single(output, tensor",
    "broadcast": "torch.distributed.broadcast(tensor, src=0",
}


def gradient_accumulation(context: AdviceContext) -> Iterator[Finding]:
    """Gradients are exchanged after each of k > 1 forwards per optimizer step.

    All exchanges but the last are needless: (k - 1) / k of the communication is taken away. On the CPU this
    is the exposed time, and the same share of two more costs: DDP fills and empties its buckets and sends the
    module's buffers; and operators beside an exchange take longer, because it uses cores and memory
    bandwidth.
    """
    exposed, rounds = _exposed(context), _rounds(context)
    if not exposed or rounds < _SEVERAL:
        return
    edit = (
        Edit(device=(DeviceWork(context.communication, 1 / rounds),))
        if context.on_device
        else context.without_host((exposed + _on_the_host(context)) * (1 - 1 / rounds), recorded=False)
    )
    yield Finding(
        "gradient-accumulation",
        f"{ns_text(exposed)} of {context.each_step} are communication with nothing beside it,"
        f" for {rounds:.0f} exchanges of gradients before one step of the optimizer",
        edit,
        "exchange gradients only after the last of the accumulated backward passes",
        "with model.no_sync(): loss.backward()  # for all micro-batches but the last",
    )


def compressed_gradients(context: AdviceContext) -> Iterator[Finding]:
    """DDP sends gradients in single precision while nothing is computed. Half of the bytes do as well."""
    exposed = [each for each in _of_kinds(context, ("all-reduce",)) if each.dtype == _SINGLE]
    if not exposed or _rounds(context) >= _SEVERAL:
        return
    yield _found(
        context,
        exposed,
        _scaled(exposed, 1 / _COMPRESSED),
        "send gradients in half precision",
        "model.register_comm_hook(None, "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)",
    )


def smaller_buckets(context: AdviceContext) -> Iterator[Finding]:
    """DDP's gradients are small already. Smaller buckets are complete earlier in backward."""
    exposed = [each for each in _of_kinds(context, ("all-reduce",)) if each.dtype != _SINGLE]
    if not exposed or _rounds(context) >= _SEVERAL:
        return
    yield _found(
        context,
        exposed,
        _hidden(context, exposed),
        "let the exchange begin earlier in backward, so that computing covers more of it",
        "DistributedDataParallel(model, bucket_cap_mb=10, gradient_as_bucket_view=True)",
    )


def sharded_prefetch(context: AdviceContext) -> Iterator[Finding]:
    """FSDP gathers parameters, and scatters gradients, while nothing is computed."""
    if not (exposed := _of_kinds(context, _SHARDING)):
        return
    change = "gather the next layer's parameters while this one computes"
    if "FSDP2" in context.run.wrappers:
        setting = "layer.set_modules_to_forward_prefetch([next_layer])"
        kept = "torch.distributed.fsdp.fully_shard(layer, reshard_after_forward=False)"
    else:
        setting = "torch.distributed.fsdp.FullyShardedDataParallel(model, forward_prefetch=True)"
        kept = "sharding_strategy=torch.distributed.fsdp.ShardingStrategy.SHARD_GRAD_OP"
    if context.run.trains:
        change += ", and keep them until backward if memory allows"
        setting += f"; {kept}"
    yield _found(context, exposed, _hidden(context, exposed), change, setting)


def sharded_optimizer(context: AdviceContext) -> Iterator[Finding]:
    """A sharded optimizer of torch or DeepSpeed exchanges while nothing is computed."""
    if not (exposed := _of_kinds(context, _ZERO_KINDS)):
        return
    yield _found(
        context,
        exposed,
        _hidden(context, exposed),
        "exchange shards while backward computes",
        '{"zero_optimization": {"overlap_comm": true}}'
        if "DeepSpeed" in context.run.wrappers
        else "torch.distributed.optim.ZeroRedundancyOptimizer(..., parameters_as_bucket_view=True)",
    )


def asynchronous_exchange(context: AdviceContext) -> Iterator[Finding]:
    """Exchanges of another origin are exposed: of a model's or optimizer's own code, or a server's."""
    own = _of_wrappers(context)
    exposed = [each for each in _of_kinds(context, tuple(_CALLS)) if each.kind not in own]
    if not exposed:
        return
    yield _found(
        context,
        exposed,
        _hidden(context, exposed),
        "start the exchange as soon as its input is ready, and wait for it where its result is needed"
        if context.run.trains
        else "exchange one half of the batch while the other half is computed",
        f"work = {_CALLS[exposed[0].kind]}, async_op=True); work.wait()",
    )


def _of_wrappers(context: AdviceContext) -> Set[str]:
    """Return the kinds of collectives that a wrapper of the run makes, which has its own advice."""
    wrappers = context.run.wrappers
    kinds: set[str] = set()
    if "DDP" in wrappers and context.run.trains:
        kinds.add("all-reduce")
    if wrappers & {"FSDP1", "FSDP2"}:
        kinds.update(_SHARDING)
    if wrappers & {"ZeRO", "DeepSpeed"} and context.run.trains:
        kinds.update(_ZERO_KINDS)
    return kinds


def _of_kinds(context: AdviceContext, kinds: Sequence[str]) -> list[Exposed]:
    return [each for each in exposed_exchanges(context) if each.kind in kinds]


def _found(
    context: AdviceContext, exposed: Sequence[Exposed], edit: Edit, change: str, setting: str
) -> Finding:
    kinds = " and ".join(each.text for each in exposed[:_MAX_KINDS])
    evidence = f"{ns_text(_sum(exposed))} of {context.each_step} are {kinds} with nothing beside them"
    return Finding("exposed-communication", evidence, edit, change, setting)


def _sum(exposed: Sequence[Exposed]) -> float:
    return sum(each.ns for each in exposed)


def _scaled(exposed: Sequence[Exposed], keep: float) -> Edit:
    return Edit(device=tuple(DeviceWork(each.rows, keep) for each in exposed))


def _hidden(context: AdviceContext, exposed: Sequence[Exposed]) -> Edit:
    """Return the edit that hides half of the exposed time that computing alone could cover."""
    free = sum(each.compute_ns - each.overlap_ns for each in context.breakdowns)
    hidden = min(_sum(exposed), context.per_step(free)) / 2
    trace = context.trace
    rows = context.in_steps(np.concatenate([each.rows for each in exposed]))
    whole = context.per_step(int((trace.end[rows] - trace.start[rows]).sum()))
    return _scaled(exposed, max(1 - hidden / whole, 0.0) if whole else 1.0)


def _rounds(context: AdviceContext) -> float:
    """Return how many of DDP's forwards exchange gradients before the next one, for each optimizer step."""
    forwards, reductions = context.annotated(_DDP_FORWARD), context.annotated(*_REDUCE)
    after = np.searchsorted(forwards.start, reductions.start, side="right")
    updates = len(context.annotated(UPDATE))
    return len(np.unique(after[after > 0])) / updates if updates else 0.0


def backend(context: AdviceContext) -> Iterator[Finding]:
    """Tensors of a device are exchanged by gloo, which takes them through the host's memory."""
    spans = context.annotated(_GLOO)
    if not len(spans):
        return
    trace = context.trace
    busy = Cover(trace.start[context.device_rows], trace.end[context.device_rows])
    exchange = Cover(spans.start, spans.end)
    alone = context.per_step((exchange | busy).length - busy.length)
    yield Finding(
        "backend",
        f"gloo exchanges tensors beside a device: {ns_text(alone)} of {context.each_step} in which "
        "the device does nothing",
        Edit(host=(HostTime(spans.start, spans.end, 1 / _NCCL_SPEED),)),
        f"exchange device tensors with {context.run.device_type.backend}",
        f'torch.distributed.init_process_group("{context.run.device_type.backend}")',
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
        context.without_host(copying, context.spans_of(rows)),
        "run one process for each device",
        "DistributedDataParallel(model, device_ids=[local_rank]); torchrun --nproc-per-node=gpu train.py",
    )


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
    rows = rows[forwards.around(context.trace, rows)]
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
    groups, kind = np.unique(kinds_of(context.trace, rows), return_inverse=True)
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


_DDP: Final = Condition("DDP seen", lambda context: "DDP" in context.run.wrappers)
_FSDP: Final = Condition("FSDP seen", lambda context: bool(context.run.wrappers & {"FSDP1", "FSDP2"}))
_ZERO: Final = Condition(
    "ZeRO or DeepSpeed seen", lambda context: bool(context.run.wrappers & {"ZeRO", "DeepSpeed"})
)
_SENDS_SINGLE: Final = Condition(
    "exposed all-reduces of float32",
    lambda context: any(each.dtype == _SINGLE for each in _of_kinds(context, ("all-reduce",))),
)
_SHARDED: Final = Condition(
    "exposed all-gathers or reduce-scatters", lambda context: bool(_of_kinds(context, _SHARDING))
)
_OWN_BACKEND: Final = Condition(
    "the device's own backend is known", lambda context: bool(context.run.device_type.backend)
)

_EXPOSED: Final = (ON_DEVICE, IDLE_KNOWN)

RULES: Final = (
    Rule("gradient-accumulation", gradient_accumulation, (TRAINS, _DDP, IDLE_KNOWN)),
    Rule("exposed-communication", compressed_gradients, (*_EXPOSED, TRAINS, _DDP, _SENDS_SINGLE)),
    Rule("exposed-communication", smaller_buckets, (*_EXPOSED, TRAINS, _DDP)),
    Rule("exposed-communication", sharded_prefetch, (*_EXPOSED, _FSDP, _SHARDED)),
    Rule("exposed-communication", sharded_optimizer, (*_EXPOSED, TRAINS, _ZERO)),
    Rule("exposed-communication", asynchronous_exchange, _EXPOSED),
    Rule("backend", backend, (*_EXPOSED, _OWN_BACKEND)),
    Rule("data-parallel", data_parallel, (IDLE_KNOWN,)),
)
