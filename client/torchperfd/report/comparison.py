"""What changed between two runs beyond noise: the step, its phases, and whether the machine itself did."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from torchperfd.model.significance import MIN_BLOCKS, MeanChange, compare_means, compare_plain_means, holm
from torchperfd.model.step_account import parts_beside
from torchperfd.report.record import RankBlocks, RunFileError, RunRecord

SCHEMA: Final = "torchperfd.run_comparison/1"
MATERIAL: Final = 0.01
"""Least change that is reported, as a part of the step time."""
_STEP_LEVEL: Final = 0.01
"""Chance of a step time that is reported as changed and is not."""
_PHASES_LEVEL: Final = 0.02
"""Chance of any phase at all that is reported as changed and is not."""
_MOVED: Final = 0.5
_UNEVEN: Final = 0.1
_MAJOR: Final = 0.03
"""Least share of the step of a phase that shows the machine's speed."""
_MIN_MAJOR: Final = 3
_AGREEING: Final = 2 / 3
_MIN_REST: Final = 0.2
_SLOW_RANK: Final = 0.05


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase, in seconds per step.

    Attributes:
        before: Its mean before, as the run's own report has it.
        after: The same after.
        mean: What was compared: of a phase that changed with spikes clipped, if that shows the change; before
            at the machine's later speed, if that has changed.
        share: Of the step before, at the machine's later speed: how much more of it the phase takes.
        share_margin: Half the width of that share's 95 % confidence interval.
        is_changed: Whether that is beyond noise, and at least 1 % of the step; where the machine's speed has
            changed, at least a tenth of that change.
    """

    name: str
    before: float
    after: float
    mean: MeanChange
    share: float
    share_margin: float
    is_changed: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """What else differs between two runs; empty on a side that does not know it."""

    name: str
    before: str
    after: str

    @property
    def words(self) -> str:
        return f"{self.name} {self.before or 'unknown'} → {self.after or 'unknown'}"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs beside each other.

    Attributes:
        is_step_changed: Whether that changed beyond what varies within a run, and by at least 1 %.
        phases: Those with at least 1 % of a step, the largest change first.
        machine_factor: By how much all phases alike take longer; None where they did not change alike.
        differences: What else differs: script, host, ranks, versions, device, CPUs and threads.
        slow_ranks: Rank with the most work of its own on each side, None where none stands out.
    """

    before: RunRecord
    after: RunRecord
    step: MeanChange
    is_step_changed: bool
    phases: tuple[PhaseChange, ...]
    machine_factor: float | None
    differences: tuple[Difference, ...]
    slow_ranks: tuple[int | None, int | None]

    @property
    def is_changed(self) -> bool:
        """Whether the run changed, and not only the speed of the machine.

        Where all phases alike take longer or shorter, no phase beyond that, and nothing else differs, the
        machine explains it: two equal runs of one script differ by so much.
        """
        is_machine = self.machine_factor is not None and not self.differences
        return self.is_step_changed and (bool(self.changed_phases) or not is_machine)

    @property
    def ratio(self) -> float:
        """By how much the step takes longer: 0.05 for 5 %."""
        return self.step.difference / self.step.before

    @property
    def ratio_margin(self) -> float:
        """Half the width of that number's 95 % confidence interval."""
        return self.step.margin / self.step.before

    @property
    def changed_phases(self) -> tuple[PhaseChange, ...]:
        return tuple(phase for phase in self.phases if phase.is_changed)

    @property
    def parts(self) -> tuple[tuple[str, float, float], ...]:
        """The parts of both runs' steps, each in words with its seconds before and after; empty if one of the
        runs has no account.
        """
        before, after = self.before.account, self.after.account
        return parts_beside(before, after) if before is not None and after is not None else ()

    @property
    def unseen(self) -> str:
        """Which run has ranks that were not seen, so that nothing can be said for all; empty without any."""
        unseen = [
            f"{run.unseen_ranks} of the {run.world_size} ranks of run {side} were not seen"
            for side, run in (("A", self.before), ("B", self.after))
            if run.unseen_ranks
        ]
        return ", and ".join(unseen)

    def is_slower_than(self, share: float) -> bool:
        """Return whether run B is slower by more than a share, also at the lower end of the interval.

        Whatever the reason: a slower machine counts, because a model that grew slows down all phases, too.
        """
        return self.is_step_changed and self.ratio - self.ratio_margin > share

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of a document of schema ``torchperfd.run_comparison/1``."""
        return {
            "schema": SCHEMA,
            "before": _side(self.before, self.slow_ranks[0]),
            "after": _side(self.after, self.slow_ranks[1]),
            "step": {**_times(self.step), "ratio": self.ratio, "ratio_margin": self.ratio_margin},
            "changed": self.is_changed,
            "step_changed": self.is_step_changed,
            "machine_factor": self.machine_factor,
            "phases": [
                {
                    "phase": phase.name,
                    **_times(phase.mean),
                    "before_seconds": phase.before,
                    "after_seconds": phase.after,
                    "share_of_step": phase.share,
                    "share_margin": phase.share_margin,
                    "changed": phase.is_changed,
                }
                for phase in self.phases
            ],
            "parts": [
                {"part": words, "before_seconds": before, "after_seconds": after}
                for words, before, after in self.parts
            ],
            "differences": [each.words for each in self.differences],
            "differing": [asdict(each) for each in self.differences],
        }


def compare_runs(before: RunRecord, after: RunRecord) -> RunComparison:
    """Compare two runs from the blocks of steps that their reports keep.

    Raises:
        RunFileError: A report has no blocks, or too few.
    """
    sides = _mean_blocks(before, "A"), _mean_blocks(after, "B")
    step = compare_means(sides[0].step, sides[1].step)
    if not step.before:
        raise RunFileError(
            f"run A, {before.run}, cannot be compared: its steps take no time", "repeat the run"
        )
    columns = _columns(*sides)
    has_changed = step.chance <= _STEP_LEVEL and abs(step.difference) >= MATERIAL * step.before
    factor = _machine_factor(columns, step) if has_changed else None
    return RunComparison(
        before=before,
        after=after,
        step=step,
        is_step_changed=has_changed,
        phases=_phases(columns, step, factor or 1.0),
        machine_factor=factor,
        differences=_differences(before, after),
        slow_ranks=(slow_rank(before), slow_rank(after)),
    )


def slow_rank(run: RunRecord) -> int | None:
    """Return the rank whose own work, without waiting for others, exceeds the median by 5 % of a step."""
    own = {
        rank.rank: rank.step_seconds - rank.waiting_seconds
        for rank in run.ranks
        if rank.step_seconds is not None
    }
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    excess = own[slowest] - statistics.median_low(list(own.values()))
    return slowest if excess > _SLOW_RANK * (run.step_seconds or math.inf) else None


_Columns = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _mean_blocks(run: RunRecord, side: str) -> RankBlocks:
    """Return blocks of the mean over ranks: of those whose blocks have as many steps as the first one's."""
    every = [rank.blocks for rank in run.ranks if rank.blocks is not None]
    if not every:
        reason = (
            "it has no training steps"
            if not run.steps
            else "it was written by an older version of torchperfd"
        )
        raise RunFileError(f"run {side}, {run.run}, cannot be compared: {reason}", "repeat the run")
    same = [blocks for blocks in every if blocks.steps == every[0].steps]
    count = min(len(blocks.step) for blocks in same)
    if count < MIN_BLOCKS or not any(same[0].step):
        raise RunFileError(
            f"run {side}, {run.run}, cannot be compared: it has {max(0, run.steps - 1)} training steps after"
            f" the first, and noise is known from {MIN_BLOCKS} on",
            "run more steps",
        )
    names = sorted({name for blocks in same for name in blocks.phases})
    zeros = (0.0,) * count
    weights = [blocks.ranks for blocks in same]

    def mean(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(values, weights) for values in zip(*columns, strict=True))

    return RankBlocks(
        every[0].steps,
        mean([blocks.step[:count] for blocks in same]),
        {name: mean([blocks.phases.get(name, zeros)[:count] for blocks in same]) for name in names},
        sum(weights),
    )


def _columns(before: RankBlocks, after: RankBlocks) -> _Columns:
    """Return the phases that take at least 1 % of a step on either side; the others cannot change by more."""
    zeros = (0.0,) * len(before.step), (0.0,) * len(after.step)
    least = MATERIAL * statistics.fmean(before.step), MATERIAL * statistics.fmean(after.step)
    found = {}
    for name in sorted(before.phases.keys() | after.phases.keys()):
        pair = before.phases.get(name, zeros[0]), after.phases.get(name, zeros[1])
        if any(statistics.fmean(column) >= limit for column, limit in zip(pair, least, strict=True)):
            found[name] = pair
    return found


def _machine_factor(columns: _Columns, step: MeanChange) -> float | None:
    """Return the factor by which all phases alike have changed; None where they have not.

    At least three phases of 3 % of the step must show it, two thirds of such phases must agree with their
    median, and these must make up two thirds of the step. A phase agrees if it changed by at least half of
    that, and its distance from the median is noise or below 1 % of the step. The median must explain at least
    half of the change of the step.
    """
    major = {
        name: pair
        for name, pair in columns.items()
        if statistics.fmean(pair[0]) >= _MAJOR * step.before
        and statistics.fmean(pair[1]) >= _MAJOR * step.after
    }
    if len(major) < _MIN_MAJOR:
        return None
    ratios = [statistics.fmean(after) / statistics.fmean(before) for before, after in major.values()]
    factor = min(
        statistics.median_low(ratios), statistics.median_high(ratios), key=lambda x: abs(math.log(x))
    )
    explained = math.log(factor) / math.log(step.after / step.before) if step.after else 0.0
    if abs(factor - 1) < MATERIAL or explained < _MOVED:
        return None
    agreeing = []
    for ratio, (before, after) in zip(ratios, major.values(), strict=True):
        beside = compare_means(before, after, factor)
        is_near = beside.chance > _STEP_LEVEL or abs(beside.difference) < MATERIAL * step.before
        if is_near and math.log(ratio) / math.log(factor) >= _MOVED:
            agreeing.append(statistics.fmean(before))
    is_most = len(agreeing) >= max(_MIN_MAJOR, _AGREEING * len(major))
    return factor if is_most and sum(agreeing) >= _AGREEING * step.before else None


def _phases(columns: _Columns, step: MeanChange, factor: float) -> tuple[PhaseChange, ...]:
    means = {name: compare_means(before, after, factor) for name, (before, after) in columns.items()}
    names = tuple(means)
    beyond_noise = [names[place] for place in holm([mean.chance for mean in means.values()], _PHASES_LEVEL)]
    scale = factor * step.before
    # Another speed of the machine does not change all phases by exactly one factor.
    least = scale * max(MATERIAL, _UNEVEN * abs(math.log(factor)))
    changed: list[str] = []
    for name in beyond_noise:
        mean = means[name]
        if abs(mean.difference) >= least and _differs_from_rest(
            columns, name, changed, rises=mean.difference > 0
        ):
            changed.append(name)
    found = []
    for name, (before, after) in columns.items():
        is_changed = name in changed
        # Without a change, spikes are no reason to show another difference than that of the means.
        mean = means[name] if is_changed else compare_plain_means(before, after, factor)
        shares = mean.difference / scale, mean.margin / scale
        own = statistics.fmean(before), statistics.fmean(after)
        found.append(PhaseChange(name, *own, replace(mean, chance=means[name].chance), *shares, is_changed))
    return tuple(sorted(found, key=lambda phase: (not phase.is_changed, -abs(phase.share), phase.name)))


def _differs_from_rest(columns: _Columns, name: str, changed: Sequence[str], *, rises: bool) -> bool:
    """Return whether a phase has changed beside the rest of the step, block by block, in that direction.

    What slows down all phases of a block alike cancels out. Phases that are known to have changed are no part
    of the rest. Where less than a fifth of the step is left, it shows nothing, and the answer is True.
    """
    ratios: list[list[float]] = []
    for side in (0, 1):
        own = columns[name][side]
        others = [each[side] for other, each in columns.items() if other != name and other not in changed]
        rest = [math.fsum(values) for values in zip(*others, strict=True)]
        whole = math.fsum(math.fsum(each[side]) for each in columns.values())
        if math.fsum(rest) < _MIN_REST * whole or not all(rest):
            return True
        ratios.append([mine / others for mine, others in zip(own, rest, strict=True)])
    relative = compare_means(ratios[0], ratios[1])
    return relative.chance <= _PHASES_LEVEL and (relative.difference > 0) == rises


def _differences(before: RunRecord, after: RunRecord) -> tuple[Difference, ...]:
    one, other = (
        {"script": run.script, "host": run.host, "ranks": str(run.world_size), **run.environment}
        for run in (before, after)
    )
    return tuple(
        Difference(name, one.get(name, ""), other.get(name, ""))
        for name in {**one, **other}
        if one.get(name, "") != other.get(name, "")
    )


def _times(mean: MeanChange) -> dict[str, float]:
    return {
        "before_seconds": mean.before,
        "after_seconds": mean.after,
        "difference_seconds": mean.difference,
        "margin_seconds": mean.margin,
        "chance": mean.chance,
        "spikes_clipped": mean.is_clipped,
    }


def _side(run: RunRecord, slow: int | None) -> dict[str, Any]:
    return {
        "run": run.run,
        "script": run.script or None,
        "host": run.host or None,
        "started_seconds": run.started,
        "exit_state": run.ending.state or None,
        "environment": run.environment,
        "steps": run.steps,
        "world_size": run.world_size,
        "cause": run.cause or None,
        "verdict": run.verdict or None,
        "slow_rank": slow,
    }
