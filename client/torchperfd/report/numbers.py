"""The numbers of the phase table: computed here, once, before anything is rendered."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchperfd.account import Account, KindAccount
from torchperfd.phases import PhaseNames

FIT = "fit"
TRAIN = "train"
VALIDATE = "validate"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the phase table; None where there is no such number.

    Attributes:
        phase: The group: ``fit``, ``train`` or ``validate``.
        action: What was done.
        mean_seconds: Mean time of a call.
        std_seconds: Population standard deviation of that time.
        calls: How often; steps, for the rows of ``fit``.
        samples_per_second: Samples of the group's steps over the time of this action alone.
        seconds_total: All of its time.
        share: Part of the whole fit.
    """

    phase: str
    action: str
    mean_seconds: float | None
    std_seconds: float | None
    calls: int | None
    samples_per_second: float | None
    seconds_total: float
    share: float


@dataclass(frozen=True, slots=True)
class Table:
    """All that a renderer needs.

    Attributes:
        rank: Whose table it is.
        steps: Training steps, the first one included.
        validations: Validation steps.
        step_seconds: Mean training step after the first.
        samples_per_second: Throughput of the training steps after the first.
        rows: The lines, group by group, within a group of phases longest first.
        notes: What a reader must know to read the numbers right.
    """

    rank: int
    steps: int
    validations: int
    step_seconds: float | None
    samples_per_second: float | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def tabulate(rank: int, account: Account, names: PhaseNames, *, dropped: int) -> Table:
    """Return the table of an account.

    The first training step is a row of its own, outside every mean, provided another followed.
    """
    apart = account.train.steps > 1 and account.warmup.steps > 0
    train = account.steady() if apart else account.train
    return Table(
        rank=rank,
        steps=account.train.steps,
        validations=account.validate.steps,
        step_seconds=_mean(train),
        samples_per_second=_rate(train.samples, train.ns),
        rows=tuple(_rows(account, train, names, apart=apart)),
        notes=tuple(_notes(account, dropped=dropped, apart=apart)),
    )


def fit_ns(account: Account) -> int:
    """Return the time from the first step's start to the last one's end.

    Where that was not kept, or the wall clock was set back meanwhile, the time of the steps.
    """
    return max(account.ended_ns - account.began_ns, account.train.ns + account.validate.ns)


def between_ns(account: Account) -> int:
    """Return the part of the fit that lies in no step; 0 where that was not kept."""
    return fit_ns(account) - account.train.ns - account.validate.ns


def _rows(account: Account, train: KindAccount, names: PhaseNames, *, apart: bool) -> Iterator[Row]:
    fit = fit_ns(account)
    if not account.train.steps and not account.validate.steps:
        return
    yield Row(FIT, "fit", None, None, 1, _rate(account.train.samples, fit), fit / 1e9, 1.0 if fit else 0.0)
    kinds = [("train", train), ("validate", account.validate)]
    if apart:
        kinds.append(("first step", account.warmup))
    for action, kind in kinds:
        if kind.steps:
            yield Row(
                FIT,
                action,
                _mean(kind),
                kind.std_seconds if kind.steps > 1 else None,
                kind.steps,
                _rate(kind.samples, kind.ns),
                kind.ns / 1e9,
                _share(kind.ns, fit),
            )
    if between_ns(account):
        between = between_ns(account)
        yield Row(FIT, "between steps", None, None, None, None, between / 1e9, _share(between, fit))
    for group, kind in ((TRAIN, train), (VALIDATE, account.validate)):
        slots = [slot for slot in range(len(names)) if kind.phases[slot].calls]
        for slot in sorted(slots, key=lambda slot: -kind.phases[slot].ns):
            phase = kind.phases[slot]
            yield Row(
                group,
                names.name(slot),
                phase.mean_seconds,
                phase.std_seconds if phase.calls > 1 else None,
                phase.calls,
                _rate(kind.samples, phase.ns),
                phase.seconds,
                _share(phase.ns, fit),
            )


def _notes(account: Account, *, dropped: int, apart: bool) -> Iterator[str]:
    if account.train.steps > 1 and not apart:
        yield "the first step is part of every mean: only the rank's own process keeps it apart"
    if account.train.steps == 1:
        yield "the one training step paid for all that is initialised lazily"
    if dropped:
        yield f"{dropped:,} steps went unrecorded; their time counts as between steps"


def _mean(kind: KindAccount) -> float | None:
    return kind.ns / kind.steps / 1e9 if kind.steps else None


def _rate(samples: int, ns: int) -> float | None:
    return samples / (ns / 1e9) if samples and ns else None


def _share(ns: int, fit: int) -> float:
    return ns / fit if fit else 0.0
