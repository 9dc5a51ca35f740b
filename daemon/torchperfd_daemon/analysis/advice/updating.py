"""Rules on the update of parameters, one by one or together, and on old gradients.

`tests/unit/daemon/test_advice_invariants.py` compares the table of optimizers, which of them update all
parameters at once and on which devices, with the signatures of the installed torch.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import DeviceWork, Edit, HostTime, Spans
from torchperfd_daemon.analysis.advice.recording import decoded
from torchperfd_daemon.analysis.advice.rules import COMPILES, IDLE_KNOWN, ON_DEVICE, TRAINS, Finding, Rule
from torchperfd_daemon.analysis.categories import UPDATE, ZERO_GRAD
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_FOREACH_DEVICES: Final = frozenset({"cuda", "xpu", "mtia", "npu", ""})
_FUSED_DEVICES: Final = frozenset({"cuda", "xpu", "mtia", "mps", "cpu"})


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """The options of one class.

    Attributes:
        fused_on: The types of devices on which its option ``fused`` works; empty without that option.
    """

    foreach: bool = False
    fused_on: frozenset[str] = frozenset()

    def option_for(self, device: str) -> str:
        """Return the option that updates all parameters at once on a type of device; empty without one."""
        if device in self.fused_on:
            return "fused=True"
        return "foreach=True" if self.foreach and device in _FOREACH_DEVICES else ""


_FOREACH: Final = OptimizerClass(foreach=True)
_BOTH: Final = OptimizerClass(foreach=True, fused_on=_FUSED_DEVICES)

TORCH_OPTIMIZERS: Final[dict[str, OptimizerClass]] = {
    "ASGD": _FOREACH,
    "Adadelta": _FOREACH,
    "Adafactor": _FOREACH,
    "Adagrad": OptimizerClass(foreach=True, fused_on=frozenset({"cuda", "cpu"})),
    "Adam": _BOTH,
    "AdamW": _BOTH,
    "Adamax": _FOREACH,
    "LBFGS": OptimizerClass(),
    "Muon": OptimizerClass(),
    "NAdam": _FOREACH,
    "RAdam": _FOREACH,
    "RMSprop": _FOREACH,
    "Rprop": _FOREACH,
    "SGD": _BOTH,
    "SparseAdam": OptimizerClass(),
}


_OPTIMIZER: Final = re.compile(r"Optimizer\.step#(\w+)\.step")
_STEP_FRAME: Final = re.compile(r"\.py\(\d+\): step$")
# Operators that updating several parameters at once does not replace.
_NOT_PLAIN: Final = re.compile(
    r"c10d::|nccl:|gloo:|record_param_comms|_c10d_functional|aten::(?:mm|bmm|addmm|baddbmm|matmul|linear|item"
    r"|_local_scalar_dense|nonzero|is_nonzero)\b|Torch-Compiled Region|## Call CompiledFxGraph|triton_"
)
_COMPILED: Final = re.compile(r"Torch-Compiled Region|## Call CompiledFxGraph|triton_")
# How long the fused update of a parameter takes on the CPU, in times of the last operator of the other: it
# goes over five or seven arrays and that one over three, but not all of it is traffic. For parameters of 2 to
# 30 MB it was 0.95 to 1.15 times with Adagrad, 1.1 to 1.6 with Adam and AdamW. Plain SGD has one operator in
# any case.
_PASS: Final = {"Adam": 1.4, "AdamW": 1.4, "Adagrad": 1.05}
_LAST: Final = "aten::addcdiv_"
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_BACKWARD: Final = "autograd::engine::evaluate_function"


def fused_optimizer(context: AdviceContext) -> Iterator[Finding]:
    """An optimizer of torch goes over its parameters in a loop of small operators.

    The saving is the overhead of all these operators, and on the CPU also their work, except for one pass
    over all arrays. A host that launches them for a device does nothing else in them: the edit takes away all
    their time but one operator's.
    """
    for each in _updates(context):
        option, is_fused = each.option, each.option == "fused=True"
        if option and (context.on_device or is_fused):
            yield _found(
                context,
                each,
                "fused-optimizer",
                f"update all parameters {'in one operator' if is_fused else 'together'}",
                f"torch.optim.{each.kind}(..., {option})",
            )


def compiled_optimizer(context: AdviceContext) -> Iterator[Finding]:
    """An optimizer without such an option, such as a class of one's own, goes over its parameters."""
    for each in _updates(context):
        if not each.option and not each.is_compiled:
            yield _found(
                context,
                each,
                "compiled-optimizer",
                "compile the optimizer's step, or write it with operators on lists of tensors",
                "step = torch.compile(optimizer.step), or torch._foreach_mul_(parameters, factor)"
                " and its like",
            )


@dataclass(frozen=True, slots=True)
class _Update:
    """The updates of one class of optimizer that go parameter by parameter.

    Attributes:
        outer: Which of the outermost operators are in them, and neither exchange nor multiply matrices.
        count: How many those are in a step.
    """

    kind: str
    option: str
    spans: Spans
    outer: Flags
    count: float
    is_compiled: bool


def _updates(context: AdviceContext) -> list[_Update]:
    """Return the optimizers that update parameter by parameter, by class; an operator is of the innermost."""
    trace, outer, steps = context.trace, context.outer, context.annotated(UPDATE)
    if not len(steps):
        return []
    names = trace.name[steps.row]
    spans_of = {name: Spans.of(trace, steps.row[names == name]) for name in np.unique(names).tolist()}
    innermost = sorted(spans_of, key=lambda name: -float((spans_of[name].end - spans_of[name].start).mean()))
    owner = np.full(len(outer.row), -1, dtype=np.int64)
    for name in innermost:
        owner[spans_of[name].around(trace, outer.row)] = name
    plain = ~trace.are_named(outer.row, _NOT_PLAIN.match)
    marks = np.flatnonzero(trace.of_names(_COMPILED.match))
    found = []
    for name, spans in spans_of.items():
        mine = owner == name
        used = {trace.names[each] for each in set(trace.name[outer.row[mine]].tolist())}
        if not used or any("_fused_" in each or "_foreach_" in each for each in used):
            continue
        chosen = mine & plain
        if not chosen.any():
            continue
        match = _OPTIMIZER.match(trace.names[name])
        kind = match[1] if match and not _is_own_class(trace, match[1]) else ""
        known = TORCH_OPTIMIZERS.get(kind)
        found.append(
            _Update(
                kind,
                known.option_for(context.run.device_type.name) if known else "",
                spans,
                chosen,
                int(chosen.sum()) / context.count,
                bool(spans.around(trace, marks).any()),
            )
        )
    return found


def _is_own_class(trace: Trace, kind: str) -> bool:
    """Return whether the file's Python frames show that a class with the name of one of torch's is not it."""
    frames = [name for name in trace.names if _STEP_FRAME.search(name)]
    return kind in TORCH_OPTIMIZERS and bool(frames) and not any("torch/optim/" in name for name in frames)


def _removable(context: AdviceContext, update: _Update) -> float:
    """Return the time that updating all parameters at once removes from all steps, in ns."""
    trace, outer, inside = context.trace, context.outer, update.outer
    overhead, work = int(outer.overhead_ns[inside].sum()), int(outer.work_ns[inside].sum())
    if context.on_device:
        whole = min(overhead + work, context.lasted(update.spans) * context.count)
        return whole * max(1 - 1 / update.count, 0.0)
    removable = float(overhead)
    last = outer.row[inside & context.named(_LAST)[outer.row]]
    if update.kind in _PASS and len(last):
        one_pass = _PASS[update.kind] * float((trace.end[last] - trace.start[last]).sum())
        removable += max(work - one_pass, 0.0)
    return removable


def _without(context: AdviceContext, update: _Update, removable: float) -> Edit:
    if not context.on_device:
        return context.without_host(context.per_step(removable))
    outer = context.outer
    places = outer.at[update.outer]
    rows = outer.row[update.outer]
    ends = context.trace.end[rows] + context.calls.gap_ns[places]
    kernels = context.launched_by(_with_children(context, rows))
    return Edit(
        host=(HostTime(context.trace.start[rows], ends, 1 / max(update.count, 1.0)),),
        device=(DeviceWork(kernels, 1.0, joined=True),),
    )


def _found(context: AdviceContext, update: _Update, rule: str, change: str, setting: str) -> Finding:
    removable = _removable(context, update)
    what = "dispatch, launches and Python" if context.on_device else "dispatch, Python and repeated passes"
    evidence = (
        f"{update.kind or 'the optimizer'}'s step runs {update.count:,.0f} operators, parameter by"
        f" parameter: {ns_text(context.lasted(update.spans))} {context.a_step},"
        f" {ns_text(context.per_step(removable))} of it {what} that one update of all does not repeat"
    )
    return Finding(rule, evidence, _without(context, update, removable), change, setting)


def zero_grad(context: AdviceContext) -> Iterator[Finding]:
    """Gradients are filled with zeros, and then added to, where dropping the old ones would do.

    The saving is the filling, and one addition into a gradient for each fill. On the CPU it is certain only
    for gradients that backward fills with zeros itself, such as an embedding's: see `_refilled`.
    """
    spans = context.annotated(ZERO_GRAD)
    if not len(spans):
        return
    trace = context.trace
    rows = context.calls.row
    fills = rows[context.named("aten::zero_", "aten::_foreach_zero_")[rows] & spans.around(trace, rows)]
    adds = rows[context.named("aten::add_")[rows]]
    adds = adds[context.annotated(_ACCUMULATE).around(trace, adds)]
    if not context.on_device:
        fills, adds = _refilled(context, fills, adds)
    if not len(fills):
        return
    ours = min(1.0, len(fills) / len(adds)) if len(adds) else 0.0
    if context.on_device:
        kernels = [context.launched_by(each) for each in (_with_children(context, fills), adds)]
        filled, added = (int((trace.end[each] - trace.start[each]).sum()) for each in kernels)
        edit = Edit(
            host=(
                HostTime(trace.start[fills], trace.end[fills]),
                HostTime(trace.start[adds], trace.end[adds], 1 - ours),
            ),
            device=(DeviceWork(kernels[0]), DeviceWork(kernels[1], 1 - ours)),
        )
    else:
        filled, added = (int((trace.end[each] - trace.start[each]).sum()) for each in (fills, adds))
        edit = context.without_host(context.per_step(filled + added * ours))
    yield Finding(
        "zero-grad",
        f"zero_grad fills {len(fills) / context.count:,.0f} gradients {context.a_step} with zeros, to which "
        f"backward then adds: {ns_text(context.per_step(filled))}"
        f" and {ns_text(context.per_step(added * ours))}",
        edit,
        "drop the old gradients, so that the new ones take their place",
        "optimizer.zero_grad(set_to_none=True)",
    )


def _refilled(context: AdviceContext, fills: Int64, adds: Int64) -> tuple[Int64, Int64]:
    """Return the fills and the additions of gradients that backward fills itself before it writes to them.

    It fills as much memory as before, and gets the memory that was dropped. A product that has written every
    layer's gradient to one place, which stays in the caches, writes to as many places as there are layers.
    That takes as long as the additions, and longer where the allocator has returned the memory to the system.
    """
    trace, rows = context.trace, context.calls.row
    backward = rows[context.named("aten::zero_")[rows] & context.annotated(_BACKWARD).around(trace, rows)]
    dims_of = decoded(trace.shapes)
    filled, added, again = (
        [_first_of(dims_of(shape)) for shape in trace.shape[each].tolist()]
        for each in (fills, adds, backward)
    )
    times, times_again = Counter(filled), Counter(again)
    sure = {each for each in times if each and times_again[each] >= times[each]}
    chosen, with_them = (
        np.array([each in sure for each in dims], dtype=np.bool_) for dims in (filled, added)
    )
    return fills[chosen], adds[with_them]


def _first_of(dims: list[Any]) -> tuple[int, ...]:
    match dims:
        case [[*sizes], *_] if all(isinstance(size, int) for size in sizes):
            return tuple(sizes)
    return ()


def _with_children(context: AdviceContext, operators: Int64) -> Int64:
    """Return the operators and what is within them: a fill is launched by the fill within it."""
    trace, calls = context.trace, context.calls
    chosen: Flags = np.isin(calls.row, operators)
    return calls.row[chosen | Spans.of(trace, operators).around(trace, calls.row)]


RULES: Final = (
    Rule("fused-optimizer", fused_optimizer, (TRAINS, IDLE_KNOWN)),
    Rule("compiled-optimizer", compiled_optimizer, (ON_DEVICE, TRAINS, IDLE_KNOWN, COMPILES)),
    Rule("zero-grad", zero_grad, (TRAINS,)),
)
