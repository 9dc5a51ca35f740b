"""Rules on the update of parameters, one by one or together, and on old gradients."""

import math
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext, Spans, decoded
from torchperfd_daemon.analysis.advice.item import Finding
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

STEP: Final = "Optimizer.step#"
ZERO_GRAD: Final = "Optimizer.zero_grad#"
_OPTIMIZER: Final = re.compile(r"Optimizer\.step#(\w+)\.step")
FUSED_ON_CPU: Final = frozenset({"Adam", "AdamW", "Adagrad", "SGD"})
# How long the fused update of a parameter takes on the CPU, in times of the last operator of the other: it
# goes over five or seven arrays and that one over three, but not all of it is traffic. For parameters of 2 to
# 30 MB it was 0.95 to 1.15 times with Adagrad, 1.1 to 1.6 with Adam and AdamW. Plain SGD has one operator in
# any case.
_PASS: Final = {"Adam": 1.4, "AdamW": 1.4, "Adagrad": 1.05}
_LAST: Final = "aten::addcdiv_"
# A product that writes to memory which is in no cache takes longer by this part of the time that filling that
# memory takes: 0.2 to 0.5 for batches of 1 to 512 and 4 MB, where what it writes is all that is not cached.
_OF_A_FILL: Final = 1 / 3
# Gradients of more bytes than this in all are in no cache when backward comes to them.
_CACHES: Final = 16 << 20
_ELEMENT: Final = 4
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_BACKWARD: Final = "autograd::engine::evaluate_function"


def fused_optimizer(context: AdviceContext) -> Iterator[Finding]:
    """The optimizer goes over its parameters in a loop of small operators.

    The saving is the overhead of all these operators, and on the CPU also their work, except for one pass
    over all arrays. A host that launches them for a device does nothing else in them: all their time but one
    operator's is saved, as far as the device idles.
    """
    spans = context.annotated(STEP)
    if not len(spans):
        return
    trace, outer = context.trace, context.outer
    inside = context.during(outer.row, spans)
    names = {trace.names[name] for name in set(trace.name[outer.row[inside]].tolist())}
    if not names or any("_fused_" in name or "_foreach_" in name for name in names):
        return
    kinds = {
        match[1]
        for name in set(trace.name[spans.row].tolist())
        if (match := _OPTIMIZER.match(trace.names[name]))
    }
    kind = kinds.pop() if len(kinds) == 1 else ""
    overhead, work = int(outer.overhead_ns[inside].sum()), int(outer.work_ns[inside].sum())
    count = int(inside.sum()) / context.count
    if not context.on_device and kind not in FUSED_ON_CPU:
        return
    fused = kind in FUSED_ON_CPU
    saved = (overhead + work) * (1 - 1 / count) if context.on_device else float(overhead)
    last = outer.row[inside & context.named(_LAST)[outer.row]]
    if not context.on_device and kind in _PASS and len(last):
        one_pass = _PASS[kind] * float((trace.end[last] - trace.start[last]).sum())
        saved += max(work - one_pass, 0.0)
    option = "fused=True" if fused else "foreach=True"
    yield Finding(
        "fused-optimizer",
        f"{kind or 'the optimizer'}'s step runs {count:,.0f} operators, parameter by parameter: "
        f"{ns_text(context.lasted(spans))} {context.a_step},"
        f" {ns_text(context.per_step(overhead))} of it dispatch and Python",
        context.per_step(saved),
        "update all parameters in one operator" if fused else "update all parameters together",
        f"torch.optim.{kind}(..., {option})" if kind else f"{option} in the optimizer's arguments",
        of_idle=context.on_device,
    )


def zero_grad(context: AdviceContext) -> Iterator[Finding]:
    """Gradients are filled with zeros, and then added to, where dropping the old ones would do.

    The saving is the filling, and one addition into a gradient for each fill. A backward that itself fills
    its result with zeros, such as an embedding's, then gets the memory that was just dropped, which is as
    warm in the caches as the old gradients. A product, however, then writes to that memory instead of a small
    one that stays in the caches, and takes longer.
    """
    spans = context.annotated(ZERO_GRAD)
    if not len(spans):
        return
    trace = context.trace
    rows = context.calls.row
    fills = rows[context.named("aten::zero_", "aten::_foreach_zero_")[rows] & context.during(rows, spans)]
    if not len(fills):
        return
    adds = rows[context.named("aten::add_")[rows]]
    adds = adds[context.during(adds, context.annotated(_ACCUMULATE))]
    ours = min(1.0, len(fills) / len(adds)) if len(adds) else 0.0
    if context.on_device:
        filled, added = (_device_ns(context, each) for each in (_with_children(context, fills), adds))
    else:
        filled, added = (int((trace.end[each] - trace.start[each]).sum()) for each in (fills, adds))
        filled += _colder(context, fills) - _written_cold(context, fills)
    yield Finding(
        "zero-grad",
        f"zero_grad fills {len(fills) / context.count:,.0f} gradients {context.a_step} with zeros, to which "
        f"backward then adds: {ns_text(context.per_step(filled))}"
        f" and {ns_text(context.per_step(added * ours))}",
        context.per_step(filled + added * ours),
        "drop the old gradients, so that the new ones take their place",
        "optimizer.zero_grad(set_to_none=True)",
    )


def _colder(context: AdviceContext, fills: Int64) -> int:
    """Return by how much backward's fills are longer than those in ``fills`` of the same shapes, in ns."""
    trace, rows = context.trace, context.calls.row
    others = rows[context.named("aten::zero_")[rows] & context.during(rows, context.annotated(_BACKWARD))]
    longer = 0.0
    for shape in set(trace.shape[fills].tolist()) - {0}:
        ours, theirs = (
            (trace.end - trace.start)[each[trace.shape[each] == shape]] for each in (fills, others)
        )
        if len(theirs):
            longer += min(len(ours), len(theirs)) * max(0.0, float(theirs.mean() - ours.mean()))
    return round(longer)


def _written_cold(context: AdviceContext, fills: Int64) -> int:
    """Return by how much products are longer that write new gradients to memory in no cache, in ns."""
    trace, rows = context.trace, context.calls.row
    dims_of = decoded(trace.shapes)
    products = rows[context.named("aten::mm")[rows] & context.during(rows, context.annotated(_BACKWARD))]
    written = {_product_of(dims_of(shape)) for shape in set(trace.shape[products].tolist())} - {()}
    filled = [_first_of(dims_of(shape)) for shape in trace.shape[fills].tolist()]
    if _ELEMENT * sum(map(math.prod, filled)) < _CACHES * context.count:
        return 0
    theirs = fills[np.fromiter((dims in written for dims in filled), np.bool_, len(filled))]
    return round(_OF_A_FILL * float((trace.end[theirs] - trace.start[theirs]).sum()))


def _product_of(dims: list[Any]) -> tuple[int, ...]:
    match dims:
        case [[int(rows), _], [_, int(columns)], *_]:
            return rows, columns
    return ()


def _first_of(dims: list[Any]) -> tuple[int, ...]:
    match dims:
        case [[*sizes], *_] if all(isinstance(size, int) for size in sizes):
            return tuple(sizes)
    return ()


def _device_ns(context: AdviceContext, operators: Int64) -> int:
    trace: Trace = context.trace
    rows = context.launched_by(operators)
    return int((trace.end[rows] - trace.start[rows]).sum())


def _with_children(context: AdviceContext, operators: Int64) -> Int64:
    """Return the operators and what is within them: a fill is launched by the fill within it."""
    trace, calls = context.trace, context.calls
    chosen: Flags = np.isin(calls.row, operators)
    order = np.argsort(trace.start[operators], kind="stable")
    spans = Spans(operators[order], trace.start[operators][order], trace.end[operators][order])
    return calls.row[chosen | context.during(calls.row, spans)]
