"""What ranks report, as metrics: ``{run, rank}`` on every series, all else joined by rank_info."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric

from torchperfd import fields
from torchperfd.fields import Field
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.cap import SeriesCap
from torchperfd_daemon.metrics.page import PREFIX
from torchperfd_daemon.ownership import Owners, from_identity
from torchperfd_daemon.parallelism import KINDS, rank_in
from torchperfd_daemon.store import HISTOGRAM_BOUNDS_S, Histogram, Rank, State, Store, Totals

_RANK = ("run", "rank")
Counted = tuple[Rank, Totals]


class TrainingMetrics:
    """A metrics source over the store.

    Args:
        owners: Returns the owner of a rank; by default from the rank's own report only.
        cap: Selects the ranks that get series; all ranks without it.
    """

    def __init__(self, store: Store, owners: Owners = from_identity, cap: SeriesCap | None = None) -> None:
        self._store = store
        self._owners = owners
        self._cap = cap

    def families(self) -> Iterator[Family | Metric]:
        """Return the families of all ranks that are here or left a moment ago."""
        self._store.forget_departed()
        ranks = list(self._store.ranks()) if self._cap is None else self._cap.select(self._store)
        # Once: a rank's next account may come while the page is made, and its phases must sum to its steps.
        counted = [(rank, rank.totals) for rank in ranks]
        yield from _families(fields.STEP_FIELDS, counted)
        yield from _phases(counted)
        yield from _families(fields.OTHER_FIELDS, counted)
        yield from _hooks(counted)
        yield from _status(ranks, self._owners)
        yield self._durations({rank.identity.run for rank in ranks})

    def _durations(self, runs: set[str]) -> Metric:
        metric = HistogramMetricFamily(
            f"{PREFIX}train_step_duration_seconds", "Training steps by duration.", labels=("run",)
        )
        for run, histogram in self._store.histograms.items():
            if run not in runs:
                continue
            metric.add_metric([run], _cumulative(histogram), sum_value=histogram.sum_seconds)
        return metric


def _families(table: Sequence[Field], counted: list[Counted]) -> Iterator[Family]:
    """Yield the metric family of each field; a rank without a value has no series."""
    for field in table:
        family = Family(field.metric, field.help, field.kind, _RANK)
        value_of = _VALUES[field]
        for rank, totals in counted:
            value = value_of(rank, totals)
            if value is not None:
                family.add(value, *_labels(rank))
        yield family


def _phases(counted: list[Counted]) -> Iterator[Family]:
    host = Family(
        "train_phase_seconds",
        "Exclusive host time by phase. All but validate sum to train_step_seconds_total.",
        "counter",
        (*_RANK, "phase"),
    )
    device = Family(
        "train_phase_device_seconds",
        "Time of a phase on the device, where that was timed.",
        "counter",
        (*_RANK, "phase"),
    )
    for rank, totals in counted:
        labels = _labels(rank)
        train, validate = totals.train, totals.validate
        for name, total in train.phases.items():
            host.add(total.ns / 1e9, *labels, name)
            if total.device_calls:
                device.add(total.device_ns / 1e9, *labels, name)
        if validate.steps:
            host.add(validate.ns / 1e9, *labels, "validate")
    yield from (host, device)


def _hooks(counted: list[Counted]) -> Iterator[Family]:
    family = Family(
        "client_hook_active",
        "1 where a hook of the client's into torch is on; where it is 0, the client's log has the reason.",
        "gauge",
        (*_RANK, "hook"),
    )
    for rank, totals in counted:
        for hook, reason in totals.hooks.items():
            family.add(float(not reason), *_labels(rank), hook)
    yield family


def _flops_utilization(rank: Rank, totals: Totals) -> float | None:
    seconds = rank.mean_step_seconds()
    if not totals.flops_per_step or not totals.peak_flops or not seconds:
        return None
    return totals.flops_per_step / seconds / totals.peak_flops


def _gc_seconds(_: Rank, totals: Totals) -> float | None:
    return sum(generation.ns for generation in totals.gc) / 1e9 if totals.gc else None


_VALUES: Final[Mapping[Field, Callable[[Rank, Totals], float | None]]] = {
    fields.STEPS: lambda _, totals: totals.train.steps,
    fields.STEP_SECONDS: lambda _, totals: totals.train.ns / 1e9,
    fields.SAMPLES: lambda _, totals: totals.train.samples,
    fields.TOKENS: lambda _, totals: totals.train.tokens or None,
    fields.MICRO_BATCHES: lambda _, totals: totals.train.micro_batches or None,
    fields.SKIPPED: lambda _, totals: totals.train.skipped if totals.train.micro_batches else None,
    fields.VALIDATE_STEPS: lambda _, totals: totals.validate.steps,
    fields.CHECKPOINT_SECONDS: lambda _, totals: totals.checkpoint.ns / 1e9 if totals.checkpoint else None,
    fields.BACKGROUND_SAVE_SECONDS: lambda _, totals: (
        totals.background_saves.ns / 1e9 if totals.background_saves else None
    ),
    fields.SYNC_WAIT_SECONDS: lambda _, totals: totals.sync_wait_ns / 1e9 if totals.sync_waits else None,
    fields.GC_SECONDS: _gc_seconds,
    fields.READY_BATCHES: lambda _, totals: totals.loader_ready,
    fields.CUDA_ALLOCATED: lambda _, totals: totals.cuda.allocated if totals.cuda else None,
    fields.CUDA_RESERVED: lambda _, totals: totals.cuda.reserved if totals.cuda else None,
    fields.CUDA_PEAK: lambda _, totals: totals.cuda.peak if totals.cuda else None,
    fields.STEP_FLOPS: lambda _, totals: totals.flops_per_step or None,
    fields.FLOPS_UTILIZATION: _flops_utilization,
    fields.OVERHEAD: lambda _, totals: totals.overhead,
    fields.SHED_TIERS: lambda _, totals: None if totals.overhead is None and not totals.shed else totals.shed,
}
"""Where a rank's totals hold each field; None where that is not known."""


def _status(ranks: list[Rank], owners: Owners) -> Iterator[Family]:
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
            "framework",
            "torch_version",
            "python_version",
            "gpu_uuid",
            "slurm_job_id",
            "pod_uid",
            "torchelastic_run_id",
            "hooks",
            *(f"{kind}_rank" for kind in KINDS),
        ),
    )
    for rank in ranks:
        labels = _labels(rank)
        identity = rank.identity
        owner = owners(identity)
        places = [rank_in(kind, rank.totals.coordinates) for kind in KINDS]
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
            rank.framework,
            identity.torch_version,
            identity.python_version,
            owner.gpu_uuid,
            owner.slurm_job_id,
            owner.pod_uid,
            owner.torchelastic_run_id,
            rank.hooks,
            *("" if place is None else str(place) for place in places),
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
