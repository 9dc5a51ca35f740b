"""What ranks report, as metrics: ``{run, rank}`` on every series, all else joined by rank_info."""

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis import RankProfile, diagnose
from torchperfd_daemon.metrics.page import PREFIX
from torchperfd_daemon.store import HISTOGRAM_BOUNDS_S, Histogram, Rank, State, Store

_RANK = ("run", "rank")


class TrainingMetrics:
    """A metrics source over the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def families(self) -> Iterator[Family | Metric]:
        """Return the families of all ranks that are here or left a moment ago."""
        self._store.forget_departed()
        ranks = list(self._store.ranks())
        yield from _totals(ranks)
        yield from _status(ranks)
        yield self._durations()
        yield self._verdicts()

    def _durations(self) -> Metric:
        metric = HistogramMetricFamily(
            f"{PREFIX}train_step_duration_seconds", "Training steps by duration.", labels=("run",)
        )
        for run, histogram in self._store.histograms.items():
            metric.add_metric([run], _cumulative(histogram), sum_value=histogram.sum_seconds)
        return metric

    def _verdicts(self) -> Family:
        family = Family("train_verdict", "1 for the present verdict on a run.", "gauge", ("run", "cause"))
        for run, ranks in self._store.runs().items():
            family.add(1, run, diagnose(run, [recent_profile(rank) for rank in ranks]).cause.value)
        return family


def recent_profile(rank: Rank) -> RankProfile:
    """Return the average of a rank's recent training steps."""
    return RankProfile(
        rank=rank.identity.rank,
        node=rank.identity.node,
        steps=len(rank.history),
        step_seconds=rank.history.mean_step_seconds(),
        phase_seconds=rank.history.mean_phase_seconds(),
    )


def _totals(ranks: list[Rank]) -> Iterator[Family]:
    steps = Family("train_steps", "Training steps.", "counter", _RANK)
    seconds = Family("train_step_seconds", "Time in training steps.", "counter", _RANK)
    samples = Family("train_samples", "Samples trained on.", "counter", _RANK)
    validated = Family("train_validate_steps", "Validation steps.", "counter", _RANK)
    phases = Family(
        "train_phase_seconds",
        "Exclusive host time by phase. All but validate sum to train_step_seconds_total.",
        "counter",
        (*_RANK, "phase"),
    )
    for rank in ranks:
        labels = _labels(rank)
        train, validate = rank.totals.train, rank.totals.validate
        steps.add(train.steps, *labels)
        seconds.add(train.ns / 1e9, *labels)
        samples.add(train.samples, *labels)
        validated.add(validate.steps, *labels)
        for name, total in train.phases.items():
            phases.add(total.ns / 1e9, *labels, name)
        if validate.steps:
            phases.add(validate.ns / 1e9, *labels, "validate")
    yield from (steps, seconds, samples, validated, phases)


def _status(ranks: list[Rank]) -> Iterator[Family]:
    last = Family("train_last_step_timestamp_seconds", "When the newest training step ended.", "gauge", _RANK)
    world = Family("train_world_size", "Ranks of the run, on all nodes.", "gauge", _RANK)
    state = Family("train_state", "1 for what the rank is doing.", "gauge", (*_RANK, "state"))
    info = Family(
        "train_rank_info",
        "Who a rank is; join on run and rank.",
        "gauge",
        (
            *_RANK,
            "job_name",
            "node",
            "local_rank",
            "node_rank",
            "script",
            "torch_version",
            "python_version",
            "slurm_job_id",
            "pod_uid",
        ),
    )
    for rank in ranks:
        labels = _labels(rank)
        identity = rank.identity
        if rank.last_step_unix_seconds:
            last.add(rank.last_step_unix_seconds, *labels)
        world.add(identity.world_size, *labels)
        for candidate in State:
            state.add(float(rank.state is candidate), *labels, candidate.value)
        info.add(
            1,
            *labels,
            identity.job_name,
            identity.node,
            str(identity.local_rank),
            str(identity.node_rank),
            identity.script,
            identity.torch_version,
            identity.python_version,
            identity.slurm_job_id,
            identity.pod_uid,
        )
    yield from (last, world, state, info)


def _labels(rank: Rank) -> tuple[str, str]:
    return rank.identity.run, str(rank.identity.rank)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets = []
    running = 0
    for bound, count in zip((*HISTOGRAM_BOUNDS_S, float("inf")), histogram.counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
    return buckets
