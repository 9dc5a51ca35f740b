"""The mean step of a run: the verdict on it if the run ends before another is published, and its long steps.

A mean step may be far above nearly all steps. `LongSteps` names the steps that are long and the reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.diagnosis.detect.straggler import find_stragglers
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.diagnosis.verdicts import diagnose
from torchperfd_daemon.observer.loader_adviser import LoaderAdviser, LoaderSample
from torchperfd_daemon.observer.rank_window import (
    WindowEdge,
    host_work,
    is_on_device,
    stage_of,
    with_window_facts,
)
from torchperfd_daemon.store.model import Totals
from torchperfd_daemon.store.store import Rank, p50_and_p95
from torchperfd_daemon.worker_cost import THIS_MACHINE

FAR_ABOVE: Final = 1.5
"""The mean step is this multiple of the 95th percentile of the newest steps at least."""
_FEW: Final = 0.05
_WAIT: Final = "collective_wait"
_MOSTLY: Final = 0.5
_MAX_RANKS: Final = 64
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class LongSteps:
    """A few steps in which a run spends much of its time.

    Attributes:
        count: About how many there are.
        of_steps: How many steps the run has made after the first.
        seconds: About how long each is.
        mean_seconds: The mean of all steps after the first.
        p95_seconds: The 95th percentile of the newest.
        reason: What the long steps are longer by, and why where that is known.
        steps: Numbers of the long steps among the newest, oldest first.
    """

    count: int
    of_steps: int
    seconds: float
    mean_seconds: float
    p95_seconds: float
    reason: str
    steps: tuple[int, ...]

    def words(self, *, with_mean: bool = True) -> str:
        """Return all of it in one line.

        Args:
            with_mean: Also the mean and the percentile.
        """
        length = duration(self.seconds)
        are_long = f"steps are long, {length} each" if self.count > 1 else f"steps is long, {length}"
        few = f"about {self.count:,} of {self.of_steps:,} {are_long}"
        mean, p95 = duration(self.mean_seconds), duration(self.p95_seconds)
        beside = f": the mean is {mean}, and 95% of the newest steps take at most {p95}" if with_mean else ""
        named = [f"{step:,}" for step in self.steps[-_MAX_NAMED:]]
        which = f"; the newest of them: {', '.join(named)}" if named else ""
        return f"{few}{beside}; {self.reason}{which}"


def find_long_steps(ranks: Sequence[Rank]) -> LongSteps | None:
    """Return the long steps of a run, if its mean step is far above the 95th percentile; else None."""
    slowest = max(ranks, key=lambda rank: rank.totals.steady_means()[1], default=None)
    if slowest is None or not slowest.steady_steps:
        return None
    (steps, mean, _), p95 = slowest.totals.steady_means(), slowest.p95_step_seconds()
    if not p95 or mean < FAR_ABOVE * p95:
        return None
    share, seconds = _share_of_long(slowest)
    if not 0 < share <= _FEW:
        # A run that was slow for a while has as large a mean.
        return None
    excess = {rank: _excess(rank) for rank in ranks[:_MAX_RANKS]}
    # What the others wait for is in the rank that has most of its own.
    rank = max(excess, key=lambda rank: sum(each for name, each in excess[rank].items() if name != _WAIT))
    durations = rank.history.newest_durations(rank.steady_steps)
    first = rank.next_step - len(durations)
    long = tuple(first + at for at, ns in enumerate(durations) if ns / 1e9 >= FAR_ABOVE * p95)
    if not long and _compiled(rank.totals, _MOSTLY * sum(excess[rank].values()) * steps):
        # Compilations at the start are over.
        return None
    reason = _reason(rank.totals, excess[rank], len(ranks))
    return LongSteps(max(1, round(share * steps)), steps, seconds, mean, p95, reason, long)


def _share_of_long(rank: Rank) -> tuple[float, float]:
    """Return which part of a rank's steps is long, and how long these are; 0 if that is not known.

    Steps have two lengths, and the shorter is the median of the newest: mean and standard deviation of all
    steps give the longer one and its part.
    """
    totals, warmup = rank.totals.train, rank.totals.warmup
    steps, mean, _ = rank.totals.steady_means()
    squares = (totals.squares - (warmup.squares if totals.steps > 1 else 0.0)) / steps / 1e18
    usual = float(p50_and_p95(rank.history.newest_durations(rank.steady_steps))[0]) / 1e9
    if squares <= mean * mean or mean <= usual:
        return 0.0, 0.0
    longer = (squares - usual * usual) / (mean - usual) - usual
    return (mean - usual) / (longer - usual), longer


def _excess(rank: Rank) -> dict[str, float]:
    """Return by how much each phase's mean over all steps exceeds its median among the newest, in seconds."""
    _, _, means = rank.totals.steady_means()
    newest = rank.history.newest(rank.steady_steps)
    medians = {name: float(p50_and_p95(column)[0]) / 1e9 for name, column in newest.phases.items() if column}
    return {name: max(0.0, mean - medians.get(name, 0.0)) for name, mean in means.items()}


def _reason(totals: Totals, excess: dict[str, float], ranks: int) -> str:
    own = {name: each for name, each in excess.items() if name != _WAIT and each}
    whole = sum(own.values())
    if whole < _MOSTLY * excess.get(_WAIT, 0.0) or not own:
        return "the long ones wait for other ranks" + ("" if ranks > 1 else ", which are not on this node")
    phase = max(own, key=lambda name: own[name])
    spent = whole * totals.train.steps
    return f"most of what they take longer is in {phase}{_why(totals, phase, spent)}"


def _why(totals: Totals, phase: str, spent: float) -> str:
    """Return why a phase is long in a few steps; empty if that is unknown.

    Args:
        spent: What the long steps took longer, in seconds of the whole run.
    """
    collections = sum(each.calls for each in totals.gc)
    if sum(each.ns for each in totals.gc) / 1e9 >= _MOSTLY * spent:
        return f": Python's garbage collector ({collections:,} collections)"
    if _compiled(totals, _MOSTLY * spent):
        return f": compilations ({totals.compiled.calls:,})"
    if phase == "data" and totals.train_pass.calls:
        return f": the first batch of an epoch ({totals.train_pass.calls:,} have ended)"
    if phase == "checkpoint" and totals.train.phases[phase].calls:
        return f": {totals.train.phases[phase].calls:,} saves within steps"
    if phase == "validate":
        return ": validation within steps"
    return ""


def _compiled(totals: Totals, seconds: float) -> bool:
    """Return whether compilations have taken so long, at least."""
    return totals.compiled.calls > 0 and totals.compiled.ns / 1e9 >= seconds


def verdict_on_mean_step(run: str, ranks: Sequence[Rank]) -> Verdict:
    """Return the verdict on the mean of all steps of a run so far.

    Args:
        ranks: All of the run's ranks on this node.
    """
    adviser = LoaderAdviser(THIS_MACHINE.get)
    adviser.published = loader_advice_of(ranks)
    has_ended = all(rank.has_ended for rank in ranks)
    # While a run goes on, windows of its steps will decide on what single steps show.
    works = {rank.identity.rank: host_work(rank, rank.steady_steps) for rank in ranks} if has_ended else {}
    late = {each.rank: each for each in find_stragglers([*works.values()])}
    means = []
    for rank in ranks:
        mean = _mean_step(rank)
        if straggler := late.get(mean.rank):
            mean = replace(mean, late_seconds=straggler.excess_seconds, late_phase=straggler.phase)
        means.append(mean)
    slowest = max(ranks, key=lambda rank: rank.totals.steady_means()[1], default=None)
    newest = slowest.newest_step_seconds() if slowest else np.zeros(0)
    return diagnose(run, means, adviser, works, has_ended=has_ended, newest=newest)


def loader_advice_of(ranks: Sequence[Rank]) -> SettledAdvice | None:
    """Return what the run of these ranks is advised on its loaders.

    It is what was settled while the run was observed. Of a run that ended before, its mean step decides; of
    one that goes on it is None until it is settled.
    """
    settled = next((rank.loader_advice for rank in ranks if rank.loader_advice is not None), None)
    if settled is not None or not all(rank.has_ended for rank in ranks):
        return settled
    return advice_on_mean_step(ranks)


def advice_on_mean_step(ranks: Iterable[Rank]) -> SettledAdvice | None:
    """Return what the mean step of all steps so far advises on loaders; None without a loader."""
    adviser = LoaderAdviser(THIS_MACHINE.get, fewest=1)
    adviser.observe([*mean_step_samples(ranks)])
    return adviser.settle()


def mean_step_samples(ranks: Iterable[Rank]) -> Iterator[LoaderSample]:
    """Yield how ranks have waited for their loaders in their mean steps, of those that have any."""
    for rank in ranks:
        steps, step_seconds, phase_seconds = rank.totals.steady_means()
        if steps and rank.totals.loader is not None:
            data, on_device = phase_seconds.get("data", 0.0), bool(rank.totals.device_means(step_seconds))
            yield LoaderSample(rank.identity.rank, rank.totals.loader, step_seconds, data, on_device)


def _mean_step(rank: Rank) -> RankEvidence:
    """Return the means of all steps of a rank without its first one."""
    totals, identity = rank.totals, rank.identity
    steps, step_seconds, phase_seconds = totals.steady_means()
    evidence = RankEvidence(
        identity.rank,
        identity.node,
        step_seconds,
        phase_seconds,
        totals.device_means(step_seconds),
        steps=steps,
        collected_seconds=sum(each.ns for each in totals.gc) / 1e9 / max(1, totals.train.steps),
        blocked_seconds=rank.blocked_seconds,
        queued_seconds=rank.queued_seconds,
        on_device=is_on_device(totals),
        hides_script_code=totals.hides_script_code,
        forward_unseen=totals.forward_unseen,
        loader=totals.loader,
        threads=totals.threads,
        cpus=totals.cpus,
        binding=totals.binding,
        world_size=identity.world_size,
        stage=stage_of(totals),
    )
    return with_window_facts(evidence, WindowEdge.of(Totals()), totals)
