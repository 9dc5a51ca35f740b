"""Rules on a host that does not keep the device, or itself, busy: many small operators, and waiting."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.advice.context import AdviceContext
from torchperfd_daemon.analysis.advice.edits import Edit, HostTime, Spans
from torchperfd_daemon.analysis.advice.recording import DISPATCH_NS, kinds_of
from torchperfd_daemon.analysis.advice.rules import (
    COMPILES,
    HAS_GRAPHS,
    HOST_RECORDED,
    IDLE_KNOWN,
    MIN_SHARE,
    NO_GRAPHS,
    NOT_COMPILED,
    ON_DEVICE,
    ON_HOST_ALONE,
    REPEATS,
    TRAINS,
    Finding,
    Rule,
)
from torchperfd_daemon.analysis.categories import DRAW, KERNEL, UPDATE, ZERO_GRAD
from torchperfd_daemon.analysis.host_activity import Cause, collective_spans
from torchperfd_daemon.analysis.idle import IdleCause
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Flags, Int64

_ACCUMULATE: Final = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# From so many calls a step, an operator on inputs of one shape is taken for a loop over samples or time:
# models of more layers than this are too large for overhead to matter.
_LOOP: Final = 128
# An operator runs up to so many times for each parameter where equal layers follow each other: a linear layer
# without bias transposes its weight once going forward and three times going backward.
_CALLS_OF_A_PARAMETER: Final = 4
_LITTLE_ELSE: Final = 0.9
_ENGINE: Final = "autograd::engine::evaluate_function: "
# To launch a kernel takes the host some 5 µs; kernels up to twice that cannot be kept queued.
_LAUNCH_NS: Final = 5_000
_TINY_KERNEL_NS: Final = 2 * _LAUNCH_NS
# With this share of the device's memory free, a batch twice as large fits.
_HALF: Final = 0.5
_MAX_PLACES: Final = 5
# Operators that make data from nothing, which a device can do by itself.
_MAKES_DATA: Final = re.compile(
    r"aten::(?:normal|uniform|random|bernoulli|exponential|log_normal|cauchy|geometric|multinomial|poisson"
    r"|rand|empty|zero|ones|full|fill|arange|linspace|logspace|eye|tri[lu]_indices)(?!\w*backward)"
)


def small_operators(context: AdviceContext) -> Iterator[Finding]:
    """One operator runs again and again on inputs of one shape: a Python loop that one tensor could replace.

    A model's own layers and parameters are no loop: the accumulation of gradients is left out, and so are
    operators that run no more often than the number of parameters explains.

    Of r such calls in a step, all overhead but one call's is saved; their work stays. An operator that
    contains little else splits a tensor for the loop, or joins its results, and is saved whole.
    Optimizers are left to their own rule, and the making of batches to the loader's. With a device, what
    counts is whether it idles: see `host_bound`.
    """
    trace, calls = context.trace, context.calls
    free = ~context.annotated(UPDATE, ZERO_GRAD, DRAW, _ACCUMULATE).around(context.trace, calls.row)
    if not free.any():
        return
    groups, group = np.unique(kinds_of(context.trace, calls.row), return_inverse=True)
    times = np.bincount(group[free], minlength=len(groups))
    parameters = len(context.annotated(_ACCUMULATE)) / context.count
    often = (times / context.count >= _LOOP) & (times / context.count > _CALLS_OF_A_PARAMETER * parameters)
    if not often.any():
        return
    own, between = (
        np.bincount(group[free], weights=each[free], minlength=len(groups))
        for each in (calls.own_ns, calls.between_ns)
    )
    # A single call may have been interrupted, so the mean of the calls decides.
    # All time of the autograd engine's own frames is dispatch.
    engine = np.zeros(len(groups), dtype=np.bool_)
    engine[group] = context.named(_ENGINE)[calls.row]
    dispatch = np.where(engine, own, np.minimum(own, times * DISPATCH_NS))
    overhead = dispatch + between
    repeated = free & often[group]
    saved = float((overhead[often] * (1 - context.count / times[often])).sum())
    saved += int((calls.own_ns + calls.between_ns)[_around(context, repeated) & free & ~repeated].sum())
    top = int(np.argmax(np.where(often, overhead, -np.inf)))
    name = trace.names[int(groups[top]) // len(trace.shapes)]
    shape = trace.shapes[int(groups[top]) % len(trace.shapes)]
    on = f" on {shape}" if shape else ""
    yield Finding(
        "small-operators",
        f"{int(times[often].sum()) / context.count:,.0f} operators a step repeat themselves, "
        f"{ns_text(context.per_step(saved))} of dispatch and Python; most of all {name}{on}, "
        f"{times[top] / context.count:,.0f} times",
        context.without_host(context.per_step(saved)),
        "make one operator on a whole batch of the loop, or let the compiler fuse it",
        "torch.vmap(f)(batch), or torch.compile(f)",
    )


def _around(context: AdviceContext, repeated: Flags) -> Flags:
    """Return which calls are in an outermost operator with a loop of ``repeated`` and little else."""
    calls, outer = context.calls, context.outer
    lengths = np.diff(np.append(outer.at, len(calls)))
    held = np.add.reduceat(repeated, outer.at, dtype=np.int64) - repeated[outer.at]
    return np.repeat((held >= _LOOP) & (held >= _LITTLE_ELSE * (lengths - 1)), lengths)


def tiny_kernels(context: AdviceContext) -> Iterator[Finding]:
    """The device idles because the host does not launch fast enough, and kernels are shorter than a launch.

    The edit takes away the host's time in the model, which is what is compiled: a graph is one launch.
    """
    if (found := _launching(context)) is None or found.median_ns >= _TINY_KERNEL_NS:
        return
    yield Finding(
        "tiny-kernels",
        found.evidence,
        _without_model(context, 0.0),
        "launch whole graphs of kernels at once",
        'model = torch.compile(model, mode="reduce-overhead")',
    )


def batch_size(context: AdviceContext) -> Iterator[Finding]:
    """The device idles for launches of longer kernels, and has memory for a batch of twice the size.

    Each sample then has half of the host's time but the loader's, and the same kernels' time.
    """
    trace = context.trace
    reserved = int(trace.memory.reserved.max(initial=0))
    if not 0 < reserved < _HALF * trace.device_memory:
        return
    if (found := _launching(context)) is None or found.median_ns < _TINY_KERNEL_NS:
        return
    yield Finding(
        "batch-size",
        f"{found.evidence}; {1 - reserved / trace.device_memory:.0%} of its memory is free",
        Edit(host=(replace(context.outside(*_per_sample(context)), keep=0.5),)),
        "double the batch, and see whether the learning rate wants to follow",
        "DataLoader(..., batch_size=2 * batch_size)",
    )


def host_bound(context: AdviceContext) -> Iterator[Finding]:
    """The device idles because the host does not launch fast enough, and neither of the two above applies.

    The edit leaves the model's kernels with the time that launching each takes.
    """
    found = _launching(context)
    if found is None or (found.median_ns < _TINY_KERNEL_NS and context.run.device_type.has_graphs):
        return
    if context.run.trains and next(batch_size(context), None) is not None:
        return
    yield Finding(
        "host-bound",
        found.evidence,
        _without_model(context, found.kernels * _LAUNCH_NS),
        "take Python out of the step, so that the host runs ahead of the device",
        "model = torch.compile(model)",
    )


@dataclass(frozen=True, slots=True)
class _Launching:
    """The kernels of a step for whose launches the device idles, and their median length in ns."""

    kernels: float
    median_ns: float
    evidence: str


def _launching(context: AdviceContext) -> _Launching | None:
    idle = context.idle_ns["launch"]
    if idle < MIN_SHARE * context.step_ns:
        return None
    kernels = context.device_rows[context.trace.of_categories({KERNEL})[context.device_rows]]
    if not len(kernels):
        return None
    trace = context.trace
    median = float(np.median(trace.end[kernels] - trace.start[kernels]))
    return _Launching(
        len(kernels) / context.count,
        median,
        f"the device idles {ns_text(idle)} of {context.each_step} because the host launches too slowly; "
        f"{len(kernels) / context.count:,.0f} kernels {context.a_step},"
        f" half of them shorter than {ns_text(median)}",
    )


def _per_sample(context: AdviceContext) -> tuple[Spans, ...]:
    """Return the host's time that each sample takes, in whatever batch: loading, computing and staging."""
    calls = context.host_calls
    return (context.annotated(DRAW), *(context.spans_of(rows) for rows in (calls.staging, calls.computing)))


def _without_model(context: AdviceContext, left_ns: float) -> Edit:
    """Return the edit that takes the host's time in the model away, but for so much of each step."""
    calls = context.host_calls
    spans = context.outside(
        *_per_sample(context),
        context.annotated(UPDATE, ZERO_GRAD),
        context.spans_of(calls.for_results),
        calls.silent,
    )
    taken = context.per_step(int((spans.end - spans.start).sum()))
    shown = {"data": DRAW, "optimizer": UPDATE, "zero_grad": ZERO_GRAD}
    others = [phase for phase, name in shown.items() if len(context.annotated(name))]
    share = context.model_share(*others) * (1 - min(left_ns / max(taken, 1.0), 1.0))
    return Edit(host=(replace(spans, keep=1 - share),))


def _material(context: AdviceContext, cause: Cause) -> tuple[float, IdleCause | None]:
    """Return a step's idle time of a cause, in ns, and the cause if that is worth advice."""
    idle = context.idle_ns[cause]
    if idle < MIN_SHARE * context.step_ns or not context.idle:
        return idle, None
    return idle, next(each for each in context.idle.causes if each.cause == cause)


def _names(cause: IdleCause) -> list[str]:
    return [" in ".join(filter(None, (place.what, place.where))) for place in cause.places[:_MAX_PLACES]]


def host_compute(context: AdviceContext) -> Iterator[Finding]:
    """The device idles while operators on the host compute its next input.

    The edit takes these operators away: the same work takes a device microseconds instead of milliseconds.
    """
    idle, cause = _material(context, "host_compute")
    if cause is None:
        return
    what = cause.places[0].what if cause.places else "operators"
    where = next(iter(_names(cause)), what)
    makes = _MAKES_DATA.search(what) is not None
    device = context.run.device_type.quoted
    draws = context.annotated(DRAW)
    loads = len(draws) > 0
    rows = context.host_calls.computing
    computing = context.spans_of(rows[~draws.around(context.trace, rows)])
    yield Finding(
        "host-compute",
        f"the device idles {ns_text(idle)} of {context.each_step} while the host computes;"
        f" most of that in {where}",
        Edit(host=(HostTime(computing.start, computing.end),)),
        f"make the data on the device: {where}"
        if makes
        else f"compute it on the device{', or in the DataLoader workers' if loads else ''}: {where}",
        f"torch.randn(..., device={device})"
        if makes
        else f"x = x.to({device}, non_blocking=True) ahead of it",
    )


def needless_synchronisation(context: AdviceContext) -> Iterator[Finding]:
    """The host waits for the device within the step, and the device then for the host.

    The edit takes all these waits away, except those that a collective of the host makes.
    """
    idle, cause = _material(context, "synchronisation")
    if cause is None:
        return
    places = _names(cause)
    where = f"; {cause.places[0].ns / max(cause.ns, 1):.0%} of that by {places[0]}" if places else ""
    when = "every so many steps" if context.run.trains else "once the next launches are queued"
    yield Finding(
        "needless-synchronisation",
        f"the device idles {ns_text(idle)} of {context.each_step} after waits for it{where}",
        Edit(waits=(_own_waits(context),)),
        f"keep values on the device, and read them {when}: " + "; ".join(places),
        "losses.append(loss.detach()) in place of loss.item(); torch.where in place of if and nonzero"
        if context.run.trains
        else 'host = x.to("cpu", non_blocking=True), and torch.Event before it is read;'
        " torch.where in place of if and nonzero",
    )


def _own_waits(context: AdviceContext) -> Int64:
    """Return the rows of waits for results that no collective of the host makes."""
    trace, rows = context.trace, context.host_calls.for_results
    spans = collective_spans(trace)
    cover = Cover(trace.start[spans], trace.end[spans])
    return rows[~cover.contains(trace.start[rows])]


_HOST_IS_LATE: Final = (ON_DEVICE, HOST_RECORDED, IDLE_KNOWN)
_MAY_COMPILE: Final = (*_HOST_IS_LATE, COMPILES, NOT_COMPILED, NO_GRAPHS)

RULES: Final = (
    Rule("small-operators", small_operators, (ON_HOST_ALONE, REPEATS)),
    Rule("tiny-kernels", tiny_kernels, (*_MAY_COMPILE, HAS_GRAPHS)),
    Rule("batch-size", batch_size, (*_HOST_IS_LATE, TRAINS)),
    Rule("host-bound", host_bound, _MAY_COMPILE),
    Rule("host-compute", host_compute, _HOST_IS_LATE),
    Rule("needless-synchronisation", needless_synchronisation, _HOST_IS_LATE),
)
