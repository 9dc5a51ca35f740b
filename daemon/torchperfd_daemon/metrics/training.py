"""Training as metrics: what ranks report, and the observer's verdicts.

Every series of a rank has ``{run, rank}``; all else is joined by rank_info.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric

from torchperfd._version import __version__
from torchperfd.model import fields
from torchperfd.model.fields import Field
from torchperfd.model.step_account import Part
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.metrics.exposition import PREFIX
from torchperfd_daemon.metrics.page import ESSENTIAL_FAMILIES, RANK_LABELS, SeriesCap
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.ownership import Owners, from_identity
from torchperfd_daemon.store.history import HISTOGRAM_BOUNDS_S, Histogram
from torchperfd_daemon.store.model import PARALLELISM_KINDS, State, Totals, rank_in
from torchperfd_daemon.store.store import Rank, Store

Counted = tuple[Rank, Totals]


class TrainingMetrics:
    """A metrics source over the store.

    Args:
        owners: Returns the owner of a rank; by default from the rank's own report only.
        cap: Selects the ranks that get series; all ranks without it.
        users: Returns the name of a user, by its number; empty to show none.
        essential_only: Make only families that are essential, which costs less than leaving out the others.
    """

    def __init__(
        self,
        store: Store,
        owners: Owners = from_identity,
        cap: SeriesCap | None = None,
        users: Callable[[int | None], str] = lambda _: "",
        *,
        essential_only: bool = False,
    ) -> None:
        self._store = store
        self._owners = owners
        self._users = users
        self._essential_only = essential_only
        self._cap = cap

    def families(self) -> Iterator[Family | Metric]:
        """Return the families of all ranks that are here or left a moment ago."""
        self._store.forget_departed()
        ranks = list(self._store.ranks()) if self._cap is None else self._cap.select(self._store)
        # Once: a rank's next account may come while the page is made, and its phases must sum to its steps.
        counted = [(rank, rank.totals) for rank in ranks]
        only = self._essential_only
        yield from _families(_shown(fields.STEP_FIELDS, essential_only=only), counted)
        yield from _phases(counted, of_device=not only)
        yield from _families(_shown(fields.OTHER_FIELDS, essential_only=only), counted)
        if not only:
            yield from _hooks(counted)
        yield from _status(ranks, self._owners, self._users, present_only=only)
        yield _unsupported(ranks)
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


def _shown(table: Sequence[Field], *, essential_only: bool) -> Sequence[Field]:
    return [field for field in table if field.metric in ESSENTIAL_FAMILIES] if essential_only else table


def _families(table: Sequence[Field], counted: list[Counted]) -> Iterator[Family]:
    """Yield the metric family of each field; a rank without a value has no series."""
    for field in table:
        family = Family(field.metric, field.help, field.kind, RANK_LABELS)
        computed = _COMPUTED.get(field)
        for rank, totals in counted:
            value = computed(rank, totals) if computed else field.value(totals)
            if value is not None:
                family.add(value, *_rank_labels(rank))
        yield family


def _phases(counted: list[Counted], *, of_device: bool) -> Iterator[Family]:
    host = Family(
        "train_phase_seconds",
        "Exclusive host time by phase. All but validate sum to train_step_seconds_total.",
        "counter",
        (*RANK_LABELS, "phase"),
    )
    device = Family(
        "train_phase_device_seconds",
        "Time of a phase on the device, where that was timed.",
        "counter",
        (*RANK_LABELS, "phase"),
    )
    for rank, totals in counted:
        labels = _rank_labels(rank)
        train, validate = totals.train, totals.validate
        for name, total in train.phases.items():
            host.add(total.ns / 1e9, *labels, name)
            if of_device and total.device_calls:
                device.add(total.device_ns / 1e9, *labels, name)
        if validate.steps:
            host.add(validate.ns / 1e9, *labels, "validate")
    yield from (host, device)


def _hooks(counted: list[Counted]) -> Iterator[Family]:
    family = Family(
        "client_hook_active",
        "1 where a hook of the client's into torch is on; where it is 0, the client's log has the reason.",
        "gauge",
        (*RANK_LABELS, "hook"),
    )
    for rank, totals in counted:
        for hook in totals.hooks:
            family.add(float(hook.is_on), *_rank_labels(rank), hook.name)
    yield family


def _flops_utilization(rank: Rank, totals: Totals) -> float | None:
    seconds = rank.mean_step_seconds()
    if not totals.flops_per_step or not totals.peak_flops or not seconds:
        return None
    return totals.flops_per_step / seconds / totals.peak_flops


def _gc_seconds(_: Rank, totals: Totals) -> float | None:
    return sum(generation.ns for generation in totals.gc) / 1e9 if totals.gc else None


_COMPUTED: Final[Mapping[Field, Callable[[Rank, Totals], float | None]]] = {
    fields.TOKENS: lambda _, totals: totals.train.tokens or None,
    fields.MICRO_BATCHES: lambda _, totals: totals.train.micro_batches or None,
    fields.SKIPPED: lambda _, totals: totals.train.skipped if totals.train.micro_batches else None,
    fields.BACKGROUND_SAVE_SECONDS: lambda _, totals: (
        totals.background_saves.ns / 1e9 if totals.background_saves.calls else None
    ),
    fields.SYNC_WAIT_SECONDS: lambda _, totals: totals.sync_wait_ns / 1e9 if totals.sync_waits else None,
    fields.GC_SECONDS: _gc_seconds,
    fields.STEP_FLOPS: lambda _, totals: totals.flops_per_step or None,
    fields.FLOPS_UTILIZATION: _flops_utilization,
    fields.SHED_TIERS: lambda _, totals: (
        None if totals.overhead is None and not totals.degradation_level else totals.degradation_level
    ),
}
"""Fields that are more than a place in a rank's totals; None where they are not known."""


def _status(
    ranks: list[Rank], owners: Owners, users: Callable[[int | None], str], *, present_only: bool
) -> Iterator[Family]:
    last = Family(
        "train_last_step_timestamp_seconds", "When the newest training step ended.", "gauge", RANK_LABELS
    )
    world = Family("train_world_size", "Ranks of the run, on all nodes.", "gauge", RANK_LABELS)
    state = Family("train_state", "1 for what the rank is doing.", "gauge", (*RANK_LABELS, "state"))
    info = Family(
        "train_rank_info",
        "Who a rank is; join on run and rank.",
        "gauge",
        (
            *RANK_LABELS,
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
            "user",
            "hooks",
            "client_version",
            *(f"{kind}_rank" for kind in PARALLELISM_KINDS),
        ),
    )
    for rank in ranks:
        labels = _rank_labels(rank)
        identity = rank.identity
        owner = owners(identity)
        places = [rank_in(kind, rank.totals.coordinates) for kind in PARALLELISM_KINDS]
        if rank.last_step_unix_seconds:
            last.add(rank.last_step_unix_seconds, *labels)
        world.add(identity.world_size, *labels)
        for candidate in (rank.state,) if present_only else State:
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
            users(rank.process.uid),
            rank.hooks,
            rank.client_version,
            *("" if place is None else str(place) for place in places),
        )
    yield from (last, world, state, info)


_RELEASE: Final = re.compile(r"(\d{1,6})\.(\d{1,6})")


def are_neighbours(version: str, other: str) -> bool:
    """Return whether two versions are of the same release, or of successive ones; true of an unknown one.

    Patches do not count. The last release before 1.0 is not known here, so each of 0.x counts.
    """
    found = sorted((int(match[1]), int(match[2])) for match in map(_RELEASE.match, (version, other)) if match)
    if len(found) < 2:
        return True
    (older_major, older_minor), (major, minor) = found
    return minor <= older_minor + 1 if major == older_major else (major, minor) == (older_major + 1, 0)


def _unsupported(ranks: list[Rank]) -> Family:
    family = Family(
        "train_unsupported_clients",
        "Ranks whose client is neither of the daemon's release nor of one next to it.",
        "gauge",
        ("run",),
    )
    found = Counter({rank.identity.run: 0 for rank in ranks})
    found.update(rank.identity.run for rank in ranks if not are_neighbours(rank.client_version, __version__))
    for run, count in found.items():
        family.add(count, run)
    return family


def _rank_labels(rank: Rank) -> tuple[str, str]:
    return rank.identity.run, str(rank.identity.rank)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    buckets = []
    running = 0
    for bound, count in zip((*HISTOGRAM_BOUNDS_S, float("inf")), histogram.counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
    return buckets


_PART_LABELS: Final = ("run", "part", "name")
_MAX_PART_NAMES: Final = 32
"""Of a run's parts, the largest have their names; the names of phases are the script's own."""


class DiagnosisMetrics:
    """A metrics source over the verdicts; for a run without a verdict, over its steps so far.

    Args:
        cap: Says of which ranks there is room; of all without one.
    """

    def __init__(self, store: Store, observer: Observer, cap: SeriesCap | None = None) -> None:
        self._store = store
        self._cap = cap
        self._observer = observer

    def families(self) -> Iterator[Family]:
        """Return verdicts, the parts of the step, what causes cost, and the ranks that others wait for."""
        self._store.forget_departed()
        runs = self._store.runs()
        if self._cap is not None:
            # A verdict is on all of a run's ranks, also where there is room for some of them only.
            shown = {rank.identity.run for rank in self._cap.select(self._store)}
            runs = {run: ranks for run, ranks in runs.items() if run in shown}
        verdicts = Family("train_verdict", "1 for the present verdict on a run.", "gauge", ("run", "cause"))
        parts = Family(
            "train_step_part_seconds",
            "Mean time per step of each part of the step; the parts of a run sum to its step.",
            "gauge",
            _PART_LABELS,
        )
        hidden = Family(
            "train_step_hidden_seconds",
            "Mean time per step beside the step, which costs nothing.",
            "gauge",
            _PART_LABELS,
        )
        for run, ranks in runs.items():
            verdict = self._observer.verdict(run) or verdict_on_mean_step(run, ranks)
            verdicts.add(1, run, verdict.cause.value)
            if verdict.account is not None:
                _add_parts(parts, run, verdict.account.parts)
                _add_parts(hidden, run, verdict.account.hidden)
        yield from (verdicts, parts, hidden)
        lost = Family(
            "train_lost_seconds",
            "Training time that a cause has cost the run, while it was the verdict.",
            "counter",
            ("run", "cause"),
        )
        for run, causes in self._observer.lost_seconds().items():
            for cause, seconds in causes.items() if run in runs else ():
                lost.add(seconds, run, cause.value)
        yield lost
        late = Family(
            "train_straggler_excess_seconds",
            "Own work per step above the peers' median, of ranks that the others wait for.",
            "gauge",
            ("run", "rank"),
        )
        for run, stragglers in self._observer.stragglers().items():
            for number, seconds in stragglers.items() if run in runs else ():
                late.add(seconds, run, str(number))
        yield late


def _add_parts(family: Family, run: str, parts: Sequence[Part]) -> None:
    """Add a series for each kind and name; the names of small parts are left out, not their time."""
    summed: defaultdict[tuple[str, str], float] = defaultdict(float)
    largest = sorted(parts, key=lambda part: -part.seconds)
    for position, part in enumerate(largest):
        summed[part.kind.value, part.name if position < _MAX_PART_NAMES else ""] += part.seconds
    for (kind, name), seconds in summed.items():
        family.add(seconds, run, kind, name)
