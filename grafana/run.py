"""The dashboard of one run: what it spends its time on, which rank is slow, and on which hardware.

A description that says "Empty ..." names the one condition under which its panel has nothing to draw.
Any other panel without data is a defect, and the integration test treats it as one.
"""

from typing import Final, TypeAlias

from grafana.panels import Target, label_values, now, over_time
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

INFO: Final = "torchperfd_train_rank_info"
OF_RUN: Final = 'run="$run"'
OF_RANKS: Final = 'run="$run",rank=~"$rank"'
# A daemon's series share one target, so this keeps the nodes on which the run has ranks.
ON_NODES_OF_RUN: Final = f"and on (job, instance) {INFO}{{{OF_RUN}}}"
# The share of step time above which TorchperfdRunInputBound fires.
INPUT_BOUND: Final = 0.3
# The part of training time above which TorchperfdClientOverhead fires.
OVERHEAD: Final = 0.01
# Grafana 11 opens it as it is, newer ones migrate it upwards; nothing here needs a later schema.
SCHEMA_VERSION: Final = 39

Panels: TypeAlias = list[Builder[model.Panel]]


def run_dashboard() -> model.Dashboard:
    """Build the dashboard with its rows in the order in which questions come up."""
    builder = (
        dashboard.Dashboard("torchperfd: one run")
        .uid("torchperfd-run")
        .description("Why is this training slow, and which rank is to blame?")
        .tags(["torchperfd", "pytorch"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(label_values("run", "Run", INFO, many=False))
        .with_variable(label_values("rank", "Rank", f"{INFO}{{{OF_RUN}}}", many=True))
    )
    rows: list[tuple[str, Panels]] = [
        ("Run", _run()),
        ("Where the time goes", _time()),
        ("Ranks", _ranks()),
        ("GPUs of the run's nodes", _gpus()),
        ("The run's nodes", _nodes()),
        ("Captures, and the profiler itself", _profiler()),
    ]
    for title, panels in rows:
        builder.with_row(dashboard.Row(title))
        for panel in panels:
            builder.with_panel(panel)
    result = builder.build()
    result.schema_version = SCHEMA_VERSION
    for number, built in enumerate(result.panels or [], start=1):
        built.id_val = number
    return result


def _rate(metric: str, matchers: str, by: str = "") -> str:
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({metric}{{{matchers}}}[$__rate_interval]))"


def _step_seconds(matchers: str = OF_RANKS, by: str = "") -> str:
    return _rate("torchperfd_train_step_seconds_total", matchers, by)


def _phase_seconds(phase: str, matchers: str = OF_RANKS, by: str = "") -> str:
    return _rate("torchperfd_train_phase_seconds_total", f'{matchers},phase="{phase}"', by)


def _steps() -> str:
    return _rate("torchperfd_train_steps_total", OF_RANKS, "rank")


def _run() -> Panels:
    return [
        now(
            "Verdict",
            "What the daemon holds to be the main cause of lost time. Empty until a run has made enough "
            "steps to judge.",
            Target(f"max by (cause) (torchperfd_train_verdict{{{OF_RUN}}}) > 0", "{{cause}}"),
            unit=units.NoUnit,
            span=6,
            text=common_model.BigValueTextMode.NAME,
        ),
        now(
            "Ranks by state",
            "How many ranks are starting, training, validating, checkpointing or finished.",
            Target(f"count by (state) (torchperfd_train_state{{{OF_RUN}}} == 1)", "{{state}}"),
            unit=units.NoUnit,
            span=6,
            text=common_model.BigValueTextMode.VALUE_AND_NAME,
        ),
        now(
            "Ranks seen of ranks expected",
            "Ranks that report to a daemon against the world size they state; fewer seen than expected "
            "means a node without a daemon, or one that is not scraped.",
            Target(f"count(count by (rank) ({INFO}{{{OF_RUN}}}))", "seen"),
            Target(f"max(torchperfd_train_world_size{{{OF_RUN}}})", "expected"),
            unit=units.NoUnit,
            span=4,
            text=common_model.BigValueTextMode.VALUE_AND_NAME,
        ),
        now(
            "Since the last step",
            "Time since any rank of the run finished a training step.",
            Target(f"time() - max(torchperfd_train_last_step_timestamp_seconds{{{OF_RUN}}} > 0)", ""),
            unit=units.Seconds,
            span=4,
            warn_above=300,
        ),
        now(
            "Step time lost to data",
            "Share of the run's training step time that its ranks spend waiting for the next batch.",
            Target(f"{_phase_seconds('data', OF_RUN)} / ({_step_seconds(OF_RUN)} > 0)", ""),
            unit=units.PercentUnit,
            span=4,
            warn_above=INPUT_BOUND,
        ),
    ]


def _time() -> Panels:
    all_phases = "torchperfd_train_phase_seconds_total"
    training_phases = f'{OF_RANKS},phase!="validate"'
    return [
        over_time(
            "Phases of a step",
            "Seconds of each phase per second of training step time, all chosen ranks together. The phases "
            "are exclusive host time and add up to the step; validation is not part of a step.",
            Target(
                f"{_rate(all_phases, training_phases, 'phase')}"
                f" / on () group_left () ({_step_seconds()} > 0)",
                "{{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        over_time(
            "Wall time by phase",
            "Seconds of each phase, validation included, per second and rank. What is missing to one is "
            "time outside of any step.",
            Target(
                f"{_rate(all_phases, OF_RANKS, 'phase')}"
                f" / on () group_left () count(count by (rank) ({INFO}{{{OF_RANKS}}}))",
                "{{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        over_time(
            "Step time lost to data, per rank",
            "Share of a rank's training step time that it waits for the next batch. In synchronous training "
            "one such rank makes all others wait for it in collective_wait.",
            Target(
                f"{_phase_seconds('data', by='rank')} / ({_step_seconds(by='rank')} > 0)", "rank {{rank}}"
            ),
            unit=units.PercentUnit,
            warn_above=INPUT_BOUND,
        ),
        over_time(
            "Step duration quantiles",
            "Duration of single training steps over all ranks of the run, from a histogram: estimates "
            "between bucket bounds. It ignores the rank selection.",
            *(
                Target(
                    f"histogram_quantile({quantile}, "
                    f"{_rate('torchperfd_train_step_duration_seconds_bucket', OF_RUN, 'le')})",
                    legend,
                )
                for quantile, legend in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
            ),
            unit=units.Seconds,
        ),
        over_time(
            "Time on the device per step, by phase",
            "Mean time that phases take on the device, without the calls that were not timed there. It "
            "passes beside the host's time and is not added to it: a forward that is short here and long "
            "there waits for the host. Empty without a CUDA device.",
            Target(
                f"{_rate('torchperfd_train_phase_device_seconds_total', OF_RANKS, 'phase')}"
                f" / on () group_left () ({_rate('torchperfd_train_steps_total', OF_RANKS)} > 0)",
                "{{phase}}",
            ),
            unit=units.Seconds,
            stacked=True,
        ),
        over_time(
            "Beside the steps",
            "Seconds per second and rank that go into saves between steps, and into pauses of Python's "
            "garbage collector wherever they fall.",
            *(
                Target(
                    f"{_rate(f'torchperfd_train_{metric}_seconds_total', OF_RANKS)}"
                    f" / count(count by (rank) ({INFO}{{{OF_RANKS}}}))",
                    legend,
                )
                for metric, legend in (("checkpoint", "checkpoints"), ("gc", "garbage collector"))
            ),
            unit=units.PercentUnit,
        ),
    ]


def _ranks() -> Panels:
    waiting = _phase_seconds("collective_wait", by="rank")
    stepping = _step_seconds(by="rank")
    skipped = _rate("torchperfd_train_skipped_optimizer_steps_total", OF_RANKS, "rank")
    micro_batches = _rate("torchperfd_train_micro_batches_total", OF_RANKS, "rank")
    return [
        over_time(
            "Step time per rank",
            "Mean duration of a training step. In synchronous training all ranks show the same: a straggler "
            "is seen in own work per step.",
            Target(f"{stepping} / ({_steps()} > 0)", "rank {{rank}}"),
            unit=units.Seconds,
        ),
        over_time(
            "Own work per step, per rank",
            "Mean step time less the time in collective_wait: the rank that stands out upwards is the one "
            "the others wait for.",
            Target(
                f"({stepping} - ({waiting} or {stepping} * 0)) / ({_steps()} > 0)",
                "rank {{rank}}",
            ),
            unit=units.Seconds,
        ),
        over_time(
            "Steps per second",
            "Training steps that each rank finishes per second of wall time.",
            Target(_steps(), "rank {{rank}}"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Samples per second",
            "Samples that the chosen ranks train on per second of wall time, together; zero where the batch "
            "size is not known.",
            Target(_rate("torchperfd_train_samples_total", OF_RANKS), "samples"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Tokens per second",
            "Tokens that the chosen ranks train on per second of wall time, together. Empty unless the "
            "script says how many there are.",
            Target(_rate("torchperfd_train_tokens_total", OF_RANKS), "tokens"),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Model FLOPs utilisation",
            "Part of its device's peak that a rank's recent training steps make use of (MFU). Empty where "
            "the FLOPs of a step or the peak are not known.",
            Target(f"torchperfd_train_model_flops_utilization_ratio{{{OF_RANKS}}}", "rank {{rank}}"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Batches ready",
            "Batches that wait in a DataLoader's workers when the loop asks for one: at zero the workers are "
            "slower than the step. Empty without workers.",
            Target(f"torchperfd_train_dataloader_ready_batches{{{OF_RANKS}}}", "rank {{rank}}"),
            unit=units.NoUnit,
        ),
        over_time(
            "CUDA memory",
            "Device memory as torch sees it: of tensors, the most that they ever had, and what is kept from "
            "the device for them. Empty without a CUDA device.",
            *(
                Target(f"torchperfd_train_cuda_{metric}_bytes{{{OF_RANKS}}}", f"rank {{{{rank}}}} {metric}")
                for metric in ("allocated", "peak", "reserved")
            ),
            unit=units.BytesIEC,
        ),
        over_time(
            "Optimizer steps skipped",
            "Optimizer steps per training step that were called off, by a GradScaler or with their gradients "
            "zeroed unused. Empty until a step went backward.",
            Target(f"{skipped} / ({_steps()} > 0)", "rank {{rank}}"),
            unit=units.PercentUnit,
        ),
        over_time(
            "Micro-batches per step",
            "Batches that go backward in a training step; more than one where gradients accumulate. Empty "
            "until a step went backward.",
            Target(f"{micro_batches} / ({_steps()} > 0)", "rank {{rank}}"),
            unit=units.NoUnit,
        ),
    ]


def _gpus() -> Panels:
    legend = "{{instance}} gpu {{gpu}}"
    absent = "Empty on nodes without an NVIDIA GPU."
    return [
        over_time(
            "GPU utilisation",
            f"Share of time in which a GPU ran at least one kernel, however small. {absent}",
            Target(f"torchperfd_gpu_utilization_ratio {ON_NODES_OF_RUN}", legend),
            unit=units.PercentUnit,
            span=8,
            top=1,
        ),
        over_time(
            "GPU memory used",
            f"Share of a GPU's memory that is allocated, by any process on the node. {absent}",
            Target(
                "torchperfd_gpu_memory_used_bytes / torchperfd_gpu_memory_total_bytes " + ON_NODES_OF_RUN,
                legend,
            ),
            unit=units.PercentUnit,
            span=8,
            top=1,
        ),
        over_time(
            "GPU power",
            f"Power that each GPU draws; a drop is often the first sign of a GPU that waits. {absent}",
            Target(f"torchperfd_gpu_power_watts {ON_NODES_OF_RUN}", legend),
            unit=units.Watt,
            span=8,
        ),
    ]


def _nodes() -> Panels:
    pressure = "rate(torchperfd_node_pressure_seconds_total[$__rate_interval])"
    network = "rate(torchperfd_node_network_bytes_total[$__rate_interval])"
    disk = "rate(torchperfd_node_disk_bytes_total[$__rate_interval])"
    return [
        over_time(
            "CPU utilisation",
            "Share of all cores of a node that are busy; near one, DataLoader workers starve.",
            Target(f"torchperfd_node_cpu_utilization_ratio {ON_NODES_OF_RUN}", "{{instance}}"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Memory available",
            "Memory that a node can still give out without swapping, and what it has in all.",
            Target(f"torchperfd_node_memory_available_bytes {ON_NODES_OF_RUN}", "{{instance}} available"),
            Target(f"torchperfd_node_memory_total_bytes {ON_NODES_OF_RUN}", "{{instance}} total"),
            unit=units.BytesIEC,
        ),
        over_time(
            "Pressure",
            "Share of time in which some or all tasks of a node wait for a resource. Empty where the kernel "
            "gives no pressure stall information.",
            Target(f"{pressure} {ON_NODES_OF_RUN}", "{{instance}} {{resource}} {{kind}}"),
            unit=units.PercentUnit,
        ),
        over_time(
            "Network and disk",
            "Bytes per second over a node's network interfaces and disks.",
            Target(f"{network} {ON_NODES_OF_RUN}", "{{instance}} network {{direction}}"),
            Target(f"{disk} {ON_NODES_OF_RUN}", "{{instance}} disk {{direction}}"),
            unit=units.BytesPerSecondIEC,
        ),
    ]


def _profiler() -> Panels:
    return [
        over_time(
            "Captures",
            "Captures since a node's daemon started, by who asked for them and how they ended. A total and "
            "not a rate, because a rate misses the first. Empty until the first capture.",
            Target(
                f"sum by (trigger, result) (torchperfd_capture_requests_total {ON_NODES_OF_RUN})",
                "{{trigger}} {{result}}",
            ),
            unit=units.NoUnit,
        ),
        over_time(
            "Captures running",
            "Captures in progress on each node; steps are slower while one runs.",
            Target(f"torchperfd_capture_active {ON_NODES_OF_RUN}", "{{instance}}"),
            unit=units.NoUnit,
        ),
        over_time(
            "Events dropped",
            "Events per second that never reached a daemon's store, by where they were lost. Step counts and "
            "phase totals stay exact; only single steps are missing.",
            Target(
                "sum by (where) (rate(torchperfd_ingest_dropped_events_total[$__rate_interval]) "
                f"{ON_NODES_OF_RUN})",
                "{{where}}",
            ),
            unit=units.CountsPerSecond,
        ),
        over_time(
            "Collectors",
            "One for a collector whose last reading worked, zero for one that failed.",
            Target(f"torchperfd_collector_success {ON_NODES_OF_RUN}", "{{instance}} {{collector}}"),
            unit=units.NoUnit,
            top=1,
        ),
        over_time(
            "Overhead of the client",
            "What torchperfd itself costs a rank, as it measures on interleaved steps. Empty until it has "
            "measured, and where measuring is off.",
            Target(f"torchperfd_client_overhead_ratio{{{OF_RANKS}}}", "rank {{rank}}"),
            unit=units.PercentUnit,
            warn_above=OVERHEAD,
        ),
        over_time(
            "Detail shed",
            "Tiers of detail that a rank's client has given up to keep within the overhead allowed. Empty "
            "until it has measured what it costs.",
            Target(f"torchperfd_client_shed_tiers{{{OF_RANKS}}}", "rank {{rank}}"),
            unit=units.NoUnit,
        ),
    ]
