"""The goodput of runs and ranks as numbers, from which text, JSON and metrics are made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchperfd_daemon.goodput.totals import Bucket


@dataclass(frozen=True, slots=True)
class RankGoodput:
    """One rank.

    Attributes:
        since_unix_seconds: When its first process started.
        until_unix_seconds: The end of the covered time.
        gpus: The number of its GPUs; 0 if none is known.
        seconds: By bucket; their sum is the time from ``since`` to ``until``.
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
        """The sum over all buckets."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The productive share of the time; 0 if there is no time."""
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
        """The sum over all ranks and buckets."""
        return sum(rank.total_seconds for rank in self.ranks)

    @property
    def ratio(self) -> float:
        """The goodput: the productive share of all rank-seconds; 0 if there are none."""
        return _ratio(self.seconds)

    @property
    def gpu_hours(self) -> dict[Bucket, float] | None:
        """GPU hours by bucket; None if no rank is known to use a GPU."""
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
        """The latest time that is covered for any rank."""
        return max(rank.until_unix_seconds for rank in self.ranks)

    @property
    def restarts(self) -> int:
        """The largest number of restarts of any rank."""
        return max(rank.starts for rank in self.ranks) - 1


def by_run(ranks: Iterable[tuple[str, RankGoodput]]) -> list[RunGoodput]:
    """Group ranks by run, in the order of rank, starting with the run that was active last."""
    runs: dict[str, list[RankGoodput]] = {}
    for run, rank in ranks:
        runs.setdefault(run, []).append(rank)
    found = [RunGoodput(run, sorted(each, key=lambda rank: rank.rank)) for run, each in runs.items()]
    return sorted(found, key=lambda run: (-run.until_unix_seconds, run.run))


def _ratio(seconds: Mapping[Bucket, float]) -> float:
    total = sum(seconds.values())
    return seconds[Bucket.PRODUCTIVE] / total if total else 0.0
