"""What a run's time went to, as numbers: the one result that text, JSON and metrics show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchperfd_daemon.goodput.totals import Bucket


@dataclass(frozen=True, slots=True)
class RankGoodput:
    """One rank.

    Attributes:
        since_unix_seconds: When its first process started.
        until_unix_seconds: Up to when its time is accounted for.
        starts: Processes that it had.
        gpus: That it uses; 0 where none is known.
        running: Whether it is here now.
        seconds: By bucket; they sum to what lies between ``since`` and ``until``.
    """

    rank: int
    since_unix_seconds: float
    until_unix_seconds: float
    starts: int
    gpus: int
    running: bool
    seconds: Mapping[Bucket, float]

    @property
    def total_seconds(self) -> float:
        """All its time."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The part of it that was productive; 0 of no time."""
        return _ratio(self.seconds)


@dataclass(frozen=True, slots=True)
class RunGoodput:
    """All ranks of one run that were on this node."""

    run: str
    ranks: Sequence[RankGoodput]

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Rank-seconds by bucket."""
        return {bucket: sum(rank.seconds[bucket] for rank in self.ranks) for bucket in Bucket}

    @property
    def total_seconds(self) -> float:
        """All rank-seconds."""
        return sum(rank.total_seconds for rank in self.ranks)

    @property
    def ratio(self) -> float:
        """The goodput: the part of all rank-seconds that was productive; 0 of no time."""
        return _ratio(self.seconds)

    @property
    def gpu_hours(self) -> dict[Bucket, float] | None:
        """GPU hours by bucket; None where no rank is known to use one."""
        if not any(rank.gpus for rank in self.ranks):
            return None
        return {
            bucket: sum(rank.gpus * rank.seconds[bucket] for rank in self.ranks) / 3600 for bucket in Bucket
        }

    @property
    def since_unix_seconds(self) -> float:
        """When its first rank started."""
        return min(rank.since_unix_seconds for rank in self.ranks)

    @property
    def until_unix_seconds(self) -> float:
        """Up to when the time of any of its ranks is accounted for."""
        return max(rank.until_unix_seconds for rank in self.ranks)

    @property
    def restarts(self) -> int:
        """How often the rank was started again that was so most often."""
        return max(rank.starts for rank in self.ranks) - 1


def by_run(ranks: Iterable[tuple[str, RankGoodput]]) -> list[RunGoodput]:
    """Return runs with their ranks in order, the run that was active last first."""
    runs: dict[str, list[RankGoodput]] = {}
    for run, rank in ranks:
        runs.setdefault(run, []).append(rank)
    found = [RunGoodput(run, sorted(each, key=lambda rank: rank.rank)) for run, each in runs.items()]
    return sorted(found, key=lambda run: (-run.until_unix_seconds, run.run))


def _ratio(seconds: Mapping[Bucket, float]) -> float:
    total = sum(seconds.values())
    return seconds[Bucket.PRODUCTIVE] / total if total else 0.0
