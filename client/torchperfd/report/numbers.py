"""The numbers of the phase table, computed here once before anything is rendered."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from torchperfd.model.totals import PhaseTotals
from torchperfd.steps.phases import DATA, PhaseNames
from torchperfd.steps.totals import KindTotals, Totals

FIT = "fit"
EPOCH = "epoch"
TRAIN = "train"
VALIDATE = "validate"
_WORTH_TELLING = 0.01
"""Least share of the fit at which garbage collection is reported."""
_MIN_DATA_SHARE = 0.05
"""Below it, how batches are made does not matter to training."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the phase table; None where there is no such number.

    Attributes:
        std_seconds: Population standard deviation of the time of a call.
        calls: How often; steps, for the rows of ``fit``, and passes, for those of ``epoch``.
        samples_per_second: Samples of the group's steps over the time of this action alone.
        share: Part of the whole fit.
        device_mean_seconds: Mean time of a call on the device.
    """

    phase: str
    action: str
    mean_seconds: float | None
    std_seconds: float | None
    calls: int | None
    samples_per_second: float | None
    seconds_total: float
    share: float
    device_mean_seconds: float | None = None


CSV_COLUMNS: Final = tuple(each.name for each in fields(Row))
"""Scripts depend on these names."""


@dataclass(frozen=True, slots=True)
class Table:
    """All that a renderer needs.

    Attributes:
        steps: Training steps, the first one included.
        step_seconds: Mean training step after the first.
        samples_per_second: Throughput of the training steps after the first.
        flops_per_second: Floating-point operations of those steps.
        flops_utilization: Part of the device's peak that this is (MFU), from 0 to 1.
        sync_wait_seconds: Per training step, the wait for the device in calls such as ``item``.
        sync_line: The line where most of that is, such as ``item() at train.py:57``; empty without a wait.
        input_stages: What making a batch takes, in words; empty if unknown or too short to matter.
        gc_seconds: Pauses of the garbage collector; None if too short to matter.
        rows: The lines, group by group, within a group of phases longest first.
        notes: What a reader must know to read the numbers right.
    """

    rank: int
    totals: Totals
    steps: int
    step_seconds: float | None
    samples_per_second: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    flops_utilization: float | None
    sync_wait_seconds: float
    sync_line: str
    input_stages: str
    gc_seconds: float | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def on_device(self) -> bool:
        return any(row.device_mean_seconds is not None for row in self.rows)


def _input_stages(totals: Totals, train: KindTotals) -> str:
    stages = totals.loader.stages if totals.loader is not None else None
    shown = stages is not None and _share(train.phases[DATA].ns, train.ns) >= _MIN_DATA_SHARE
    return stages.words if stages is not None and shown else ""


def tabulate(rank: int, totals: Totals, names: PhaseNames, *, dropped: int) -> Table:
    """Return the table of totals.

    The first training step is a row of its own, outside every mean, provided another followed.
    """
    apart = _apart(totals)
    train = steady_steps(totals)
    gc_ns = sum(generation.ns for generation in totals.gc)
    return Table(
        rank=rank,
        totals=totals,
        steps=totals.train.steps,
        step_seconds=_mean(train),
        samples_per_second=_rate(train.samples, train.ns),
        tokens_per_second=_rate(train.tokens, train.ns),
        flops_per_second=_rate((totals.flops_per_step or 0.0) * train.steps, train.ns),
        flops_utilization=totals.flops_utilization(train),
        sync_wait_seconds=totals.sync_wait_ns / totals.train.steps / 1e9 if totals.train.steps else 0.0,
        sync_line=totals.sync_waits[0].words if totals.sync_waits else "",
        input_stages=_input_stages(totals, train),
        gc_seconds=gc_ns / 1e9 if _share(gc_ns, fit_ns(totals)) >= _WORTH_TELLING else None,
        rows=tuple(_rows(totals, train, names, apart=apart)),
        notes=tuple(_notes(totals, dropped=dropped, apart=apart)),
    )


def steady_steps(totals: Totals) -> KindTotals:
    """Return the training steps that means are made of: those after the first, where it is kept apart."""
    return totals.steady() if _apart(totals) else totals.train


def fit_ns(totals: Totals) -> int:
    """Return the time from the first step's start to the last one's end.

    Where that was not kept, or the wall clock was set back meanwhile, the time of the steps. An epoch
    begins before its first step, when its loader does, and is never longer than the fit.
    """
    steps_ns = totals.train.ns + totals.validate.ns
    return max(totals.ended_ns - totals.began_ns, steps_ns, totals.epoch.ns)


def between_ns(totals: Totals) -> int:
    """Return the part of the fit that lies in no step; 0 where that was not kept."""
    return fit_ns(totals) - totals.train.ns - totals.validate.ns


def _apart(totals: Totals) -> bool:
    return totals.train.steps > 1 and totals.warmup.steps > 0


def _rows(totals: Totals, train: KindTotals, names: PhaseNames, *, apart: bool) -> Iterator[Row]:
    fit = fit_ns(totals)
    if not totals.train.steps and not totals.validate.steps:
        return
    yield Row(FIT, "fit", None, None, 1, _rate(totals.train.samples, fit), fit / 1e9, 1.0 if fit else 0.0)
    kinds = [("train", train), ("validate", totals.validate)]
    if apart:
        kinds.append(("first step", totals.warmup))
    for action, kind in kinds:
        if kind.steps:
            yield _row(FIT, action, kind, kind.samples, fit)
    if between_ns(totals):
        between = between_ns(totals)
        yield Row(FIT, "between steps", None, None, None, None, between / 1e9, _share(between, fit))
    for action, passes in (
        ("epoch", totals.epoch),
        ("train", totals.train_pass),
        ("validate", totals.validate_pass),
    ):
        if passes.calls:
            yield _row(EPOCH, action, passes, 0, fit)
    for group, kind in ((TRAIN, train), (VALIDATE, totals.validate)):
        slots = [slot for slot in range(len(names)) if kind.phases[slot].calls]
        for slot in sorted(slots, key=lambda slot: -kind.phases[slot].ns):
            yield _row(group, names.name(slot), kind.phases[slot], kind.samples, fit)


def _row(group: str, action: str, times: KindTotals | PhaseTotals, samples: int, fit: int) -> Row:
    calls = times.steps if isinstance(times, KindTotals) else times.calls
    return Row(
        phase=group,
        action=action,
        mean_seconds=times.mean_seconds,
        std_seconds=times.std_seconds if calls > 1 else None,
        calls=calls,
        samples_per_second=_rate(samples, times.ns),
        seconds_total=times.ns / 1e9,
        share=_share(times.ns, fit),
        device_mean_seconds=None if isinstance(times, KindTotals) else times.device_mean_seconds,
    )


def _notes(totals: Totals, *, dropped: int, apart: bool) -> Iterator[str]:
    if totals.train.steps > 1 and not apart:
        yield "the first step is part of every mean: it was not kept apart"
    if totals.train.steps == 1:
        yield "the one training step paid for all that is initialised lazily"
    if any(phase.device_calls for kind in (totals.train, totals.validate) for phase in kind.phases):
        yield "time on the device passes beside the host's, so the two are never added up"
    if dropped:
        yield f"{dropped:,} steps went unrecorded; their time counts as between steps"
    for hook in totals.hooks:
        if not hook.is_on:
            yield f"hook {hook.name} is off: {hook.reason}; what it measures is missing"


def _mean(kind: KindTotals) -> float | None:
    return kind.mean_seconds if kind.steps else None


def _rate(count: float, ns: int) -> float | None:
    return count / (ns / 1e9) if count and ns else None


def _share(ns: int, fit: int) -> float:
    return ns / fit if fit else 0.0
