"""The dashboard of all runs and nodes: what is running, what is lost, and what does not answer."""

from typing import Final

from grafana.config import DAEMONS, HARDWARE_THROTTLING, metric, threshold
from grafana.layout import DAEMON, FLEET, NODE, RUN, Panels, Row, address, build, top
from grafana.panels import Column, Link, Target, bars, now, over_time, rows_of
from grafana.queries import (
    BOARDS,
    busiest,
    increase,
    lost_gpus,
    missing,
    per,
    phase_seconds,
    ranks,
    rate,
    step_seconds,
    steps,
    up,
)
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

_INFO: Final = metric("train_rank_info")
_GOODPUT: Final = "train_goodput_seconds_total"
_PRODUCTIVE: Final = 'bucket="productive"'
_NO_GPU: Final = "Empty without an NVIDIA GPU on any node."


def fleet_dashboard() -> model.Dashboard:
    """Build the dashboard."""
    return build(
        FLEET,
        "What is running, how many GPU-hours are lost to what, and which nodes do not answer?",
        [top()],
        [
            Row("Now", _now()),
            Row("Runs", _runs()),
            Row("Lost time", _lost()),
            Row("Nodes and daemons", _nodes()),
            Row("GPUs", _gpus(), collapsed=True),
        ],
    )


def _now() -> Panels:
    return [
        now(
            "Runs",
            "Runs that report to a scraped daemon.",
            Target(f"count(count by (run) ({_INFO}))", ""),
            unit=units.NoUnit,
            span=3,
        ),
        now(
            "Ranks that report",
            "Ranks that report to a scraped daemon.",
            Target(f"sum({ranks()})", ""),
            unit=units.NoUnit,
            span=3,
        ),
        now(
            "Ranks missing",
            "Ranks that belong to a run and that no scraped daemon reports: their node has no daemon, or is "
            "not scraped.",
            Target(f"sum({missing()})", ""),
            unit=units.NoUnit,
            span=3,
            warn_above=1,
        ),
        now(
            "Daemons up",
            "Daemons that Prometheus scrapes.",
            Target(f"count({up(DAEMONS)} == 1)", ""),
            unit=units.NoUnit,
            span=3,
        ),
        now(
            "Daemons down",
            "Daemons that Prometheus knows and cannot scrape.",
            Target(f"count({up(DAEMONS)} == 0) or vector(0)", ""),
            unit=units.NoUnit,
            span=3,
            warn_above=1,
            links=[Link("Daemon", address(DAEMON))],
        ),
        now(
            "GPUs",
            f"GPUs of all nodes, without MIG instances. {_NO_GPU}",
            Target(f"count({metric('gpu_up', BOARDS)})", ""),
            unit=units.NoUnit,
            span=3,
        ),
        now(
            "GPUs lost",
            f"GPUs that their driver does not reach any more. {_NO_GPU}",
            Target(f"sum(1 - {metric('gpu_up', BOARDS)})", ""),
            unit=units.NoUnit,
            span=3,
            warn_above=1,
        ),
        now(
            "Goodput",
            "Productive share of all rank-seconds in the time range. Empty until time of a run was settled.",
            Target(per(increase(_GOODPUT, _PRODUCTIVE), increase(_GOODPUT)), ""),
            unit=units.PercentUnit,
            span=3,
            warn_below=threshold("TorchperfdGoodputLow"),
        ),
    ]


def _runs() -> Panels:
    return [
        rows_of(
            "All runs",
            "One row for each run. A click on a run opens its dashboard. Ranks seen below ranks expected "
            "mean a node without a daemon.",
            Column("ranks seen", ranks()),
            Column("ranks expected", f"max by (run) ({metric('train_world_size')})"),
            Column("steps/s", f"max by (run) (rate({metric('train_steps_total')}[$__rate_interval]))"),
            Column("step", per(step_seconds(by="run"), steps(by="run"), "run"), units.Seconds),
            Column(
                "data",
                per(phase_seconds("data", by="run"), step_seconds(by="run"), "run"),
                units.PercentUnit,
                threshold("TorchperfdRunInputBound"),
            ),
            Column(
                "goodput",
                per(increase(_GOODPUT, _PRODUCTIVE, "run"), increase(_GOODPUT, by="run"), "run"),
                units.PercentUnit,
                threshold("TorchperfdGoodputLow"),
                below=True,
            ),
            Column(
                "last step",
                f"time() - max by (run) ({metric('train_last_step_timestamp_seconds')} > 0)",
                units.Seconds,
                threshold("TorchperfdRunStalled"),
            ),
            keys={"run": [Link("Open run", address(RUN, run="${__data.fields.run:percentencode}"))]},
        ),
        over_time(
            "Runs by verdict",
            "Runs by the main cause of lost time that their daemons found; none means that nothing takes "
            "more than 5 % of the step. Empty until a run made enough steps.",
            Target(f"count by (cause) (max by (run, cause) ({metric('train_verdict')}) > 0)", "{{cause}}"),
            unit=units.NoUnit,
            stacked=True,
        ),
        over_time(
            "Step time lost to data",
            "Share of step time that the runs which wait most for data lose to it.",
            Target(busiest(per(phase_seconds("data", by="run"), step_seconds(by="run"), "run")), "{{run}}"),
            unit=units.PercentUnit,
            warn_above=threshold("TorchperfdRunInputBound"),
            links=[Link("Open run", address(RUN, run="${__field.labels.run:percentencode}"))],
        ),
    ]


def _lost() -> Panels:
    return [
        bars(
            "GPU-hours lost by cause",
            "Rank-hours lost in the time range to each cause, while its verdict was published. Empty while "
            "no cause was found.",
            Target(f"{lost_gpus('increase({}[$__range])')} / 3600", "{{cause}}"),
            unit=units.Hours,
        ),
        over_time(
            "GPUs lost to causes",
            "Ranks' worth of time that goes to each cause at each moment. Empty while no cause is found.",
            Target(lost_gpus("rate({}[$__rate_interval])"), "{{cause}}"),
            unit=units.NoUnit,
            stacked=True,
        ),
        over_time(
            "Rank time by use",
            "Share of all rank-seconds by what they went to; productive is goodput. Empty until time of a "
            "run was settled.",
            Target(
                f"{rate(_GOODPUT, by='bucket')} / on () group_left () ({rate(_GOODPUT)} > 0)", "{{bucket}}"
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        bars(
            "Runs that lost most",
            "Rank-hours lost in the time range, of the runs that lost most. Empty while no cause was found.",
            Target(busiest(f"{lost_gpus('increase({}[$__range])', by='run')} / 3600"), "{{run}}"),
            unit=units.Hours,
            links=[Link("Open run", address(RUN, run="${__field.labels.run:percentencode}"))],
        ),
    ]


def _nodes() -> Panels:
    node = "instance"
    memory = (
        f"max by ({node}) ({metric('node_memory_available_bytes')})"
        f" / max by ({node}) ({metric('node_memory_total_bytes')})"
    )
    return [
        rows_of(
            "Nodes",
            "One row for each daemon that Prometheus knows. Up is 0 for one that does not answer. GPU "
            "columns are blank on nodes without one.",
            Column("up", f"max by ({node}) ({up(DAEMONS)})", red_above=1, below=True),
            Column("ranks", f"count by ({node}) ({_INFO})"),
            Column("CPU", f"max by ({node}) ({metric('node_cpu_utilization_ratio')})", units.PercentUnit),
            Column(
                "memory left",
                memory,
                units.PercentUnit,
                threshold("TorchperfdNodeMemoryNearlyFull"),
                below=True,
            ),
            Column("failing collectors", f"sum by ({node}) (1 - {metric('collector_success')})", red_above=1),
            keys={
                node: [
                    Link("Node and GPUs", address(NODE, instance="${__data.fields.instance:percentencode}")),
                    Link("Daemon", address(DAEMON, instance="${__data.fields.instance:percentencode}")),
                ]
            },
        ),
        over_time(
            "Daemons that do not answer",
            "One for each daemon that Prometheus cannot scrape, by name. Empty while all answer.",
            Target(f"1 - {up(DAEMONS)} > 0", "{{instance}}"),
            unit=units.NoUnit,
            points=True,
        ),
        over_time(
            "Ranks missing by run",
            "Ranks of each run that no scraped daemon reports. Empty while none is missing.",
            Target(busiest(f"{missing()} > 0"), "{{run}}"),
            unit=units.NoUnit,
            points=True,
            links=[Link("Open run", address(RUN, run="${__field.labels.run:percentencode}"))],
        ),
    ]


def _gpus() -> Panels:
    used = metric("gpu_utilization_ratio", BOARDS)
    throttled = metric("gpu_throttle_seconds_total", f'reason=~"{HARDWARE_THROTTLING}"')
    node_link = [Link("Node and GPUs", address(NODE, instance="${__field.labels.instance:percentencode}"))]
    return [
        over_time(
            "GPU utilisation",
            f"Share of time in which a kernel runs, over all GPUs. {_NO_GPU}",
            *(
                Target(f"quantile({quantile}, {used})", legend)
                for quantile, legend in ((0.05, "lowest 5 %"), (0.5, "median"), (0.95, "highest 5 %"))
            ),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Allocated GPUs without work",
            "GPUs that a scheduler gave to an owner and that run almost no kernel. Empty without an owner.",
            Target(
                f"count({metric('gpu_allocation_info')} and on (job, instance, gpu_uuid) ({used} < "
                f"{threshold('TorchperfdGpuIdle'):g})) or 0 * count({metric('gpu_allocation_info')})",
                "idle",
            ),
            unit=units.NoUnit,
        ),
        over_time(
            "Hardware throttling",
            "Share of time in which heat or a power brake holds down clocks, of the GPUs hit most. Empty "
            "while no GPU is held down.",
            Target(
                busiest(f"sum by (instance, gpu, reason) (rate({throttled}[$__rate_interval])) > 0"),
                "{{instance}} gpu {{gpu}} {{reason}}",
            ),
            unit=units.PercentUnit,
            points=True,
            warn_above=threshold("TorchperfdGpuThrottled"),
            links=node_link,
        ),
        now(
            "XIDs in the time range",
            "GPUs and XIDs that drivers reported within the time range. Empty without an XID.",
            Target(
                f"count by (xid) (time() - {metric('gpu_xid_last_timestamp_seconds')} < $__range_s)",
                "XID {{xid}}",
            ),
            unit=units.NoUnit,
            span=12,
            text=common_model.BigValueTextMode.VALUE_AND_NAME,
        ),
    ]
