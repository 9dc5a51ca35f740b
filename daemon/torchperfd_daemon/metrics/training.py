"""What ranks report, as metrics: ``{run, rank}`` on every series, all else joined by rank_info."""

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis import RankProfile
from torchperfd_daemon.metrics.cap import SeriesCap
from torchperfd_daemon.metrics.page import PREFIX
from torchperfd_daemon.ownership import Owners, as_told
from torchperfd_daemon.store import HISTOGRAM_BOUNDS_S, Histogram, Rank, State, Store, Totals

_RANK = ("run", "rank")
Counted = tuple[Rank, Totals]


class TrainingMetrics:
    """A metrics source over the store.

    Args:
        store: Where ranks and their steps are.
        owners: Tells whose a rank is; by default only what it told itself.
        cap: Says of which ranks there is room; of all without one.
    """

    def __init__(self, store: Store, owners: Owners = as_told, cap: SeriesCap | None = None) -> None:
        self._store = store
        self._owners = owners
        self._cap = cap

    def families(self) -> Iterator[Family | Metric]:
        """Return the families of all ranks that are here or left a moment ago."""
        self._store.forget_departed()
        ranks = list(self._store.ranks()) if self._cap is None else self._cap.select(self._store)
        # Once: a rank's next account may come while the page is made, and its phases must sum to its steps.
        counted = [(rank, rank.totals) for rank in ranks]
        yield from _totals(counted)
        yield from _phases(counted)
        yield from _beside(counted)
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


def recent_profile(rank: Rank) -> RankProfile:
    """Return the average of a rank's recent training steps."""
    return RankProfile(
        rank=rank.identity.rank,
        node=rank.identity.node,
        steps=len(rank.history),
        step_seconds=rank.mean_step_seconds(),
        phase_seconds=rank.mean_phase_seconds(),
    )


def _totals(counted: list[Counted]) -> Iterator[Family]:
    steps = Family("train_steps", "Training steps.", "counter", _RANK)
    seconds = Family("train_step_seconds", "Time in training steps.", "counter", _RANK)
    samples = Family("train_samples", "Samples trained on.", "counter", _RANK)
    tokens = Family("train_tokens", "Tokens trained on, where the script tells.", "counter", _RANK)
    micro_batches = Family("train_micro_batches", "Batches that went backward.", "counter", _RANK)
    skipped = Family(
        "train_skipped_optimizer_steps",
        "Optimizer steps that were called off: refused by a GradScaler, or their gradients zeroed unused.",
        "counter",
        _RANK,
    )
    validated = Family("train_validate_steps", "Validation steps.", "counter", _RANK)
    for rank, totals in counted:
        labels = _labels(rank)
        train, validate = totals.train, totals.validate
        steps.add(train.steps, *labels)
        seconds.add(train.ns / 1e9, *labels)
        samples.add(train.samples, *labels)
        if train.tokens:
            tokens.add(train.tokens, *labels)
        if train.micro_batches:
            micro_batches.add(train.micro_batches, *labels)
            skipped.add(train.skipped, *labels)
        validated.add(validate.steps, *labels)
    yield from (steps, seconds, samples, tokens, micro_batches, skipped, validated)


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


def _beside(counted: list[Counted]) -> Iterator[Family]:
    """What is measured beside the steps; each series is absent where its rank does not know."""
    saves = Family(
        "train_checkpoint_seconds",
        "Time of saves between steps; that of saves within a step is its phase checkpoint.",
        "counter",
        _RANK,
    )
    gc = Family(
        "train_gc_seconds",
        "Pauses of Python's garbage collector, from the first step on.",
        "counter",
        _RANK,
    )
    ready = Family(
        "train_dataloader_ready_batches",
        "Batches that waited in the loader's workers at the newest draw; 0 when they starve.",
        "gauge",
        _RANK,
    )
    allocated = Family("train_cuda_allocated_bytes", "Device memory of tensors.", "gauge", _RANK)
    reserved = Family("train_cuda_reserved_bytes", "Device memory that torch keeps.", "gauge", _RANK)
    peak = Family("train_cuda_peak_bytes", "Most device memory that tensors ever had.", "gauge", _RANK)
    flops = Family("train_step_flops", "Floating-point operations of a training step.", "gauge", _RANK)
    utilization = Family(
        "train_model_flops_utilization_ratio",
        "Part of the device's peak that recent training steps make use of (MFU).",
        "gauge",
        _RANK,
    )
    overhead = Family(
        "client_overhead_ratio", "Cost of the client as a part of the time of training.", "gauge", _RANK
    )
    shed = Family(
        "client_shed_tiers",
        "Tiers of detail that the client has given up to keep within the overhead allowed.",
        "gauge",
        _RANK,
    )
    hooks = Family(
        "client_hook_active",
        "1 where a hook of the client's into torch is on; where it is 0, the client's log has the reason.",
        "gauge",
        (*_RANK, "hook"),
    )
    for rank, totals in counted:
        labels = _labels(rank)
        for hook, reason in totals.hooks.items():
            hooks.add(float(not reason), *labels, hook)
        if totals.checkpoint is not None:
            saves.add(totals.checkpoint.ns / 1e9, *labels)
        if totals.gc:
            gc.add(sum(generation.ns for generation in totals.gc) / 1e9, *labels)
        if totals.loader_ready is not None:
            ready.add(totals.loader_ready, *labels)
        if totals.cuda is not None:
            allocated.add(totals.cuda.allocated, *labels)
            reserved.add(totals.cuda.reserved, *labels)
            peak.add(totals.cuda.peak, *labels)
        if totals.flops_per_step:
            flops.add(totals.flops_per_step, *labels)
            step_seconds = rank.mean_step_seconds()
            if totals.peak_flops and step_seconds:
                utilization.add(totals.flops_per_step / step_seconds / totals.peak_flops, *labels)
        if totals.overhead is not None:
            overhead.add(totals.overhead, *labels)
        if totals.overhead is not None or totals.shed:
            shed.add(totals.shed, *labels)
    yield from (saves, gc, ready, allocated, reserved, peak, flops, utilization, overhead, shed, hooks)


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
        ),
    )
    for rank in ranks:
        labels = _labels(rank)
        identity = rank.identity
        owner = owners(identity)
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
