"""The rows of a run's dashboard about its nodes and about the profiler itself."""

from typing import Final

from grafana.config import metric, threshold
from grafana.layout import NODE, RANK, Panels, address
from grafana.panels import Link, Target, over_time
from grafana.queries import busiest, on_nodes_of
from grafana_foundation_sdk.models import units

RUN: Final = 'run="$run"'
RANKS: Final = 'run="$run",rank=~"$rank"'
LEGEND: Final = "rank {{rank}}"
OPEN_RANK: Final = [
    Link("Open rank", address(RANK, run="${run:percentencode}", rank="${__field.labels.rank}"))
]
_ITS_NODES: Final = on_nodes_of(RUN)
_OPEN_NODE: Final = [Link("Open node", address(NODE, instance="${__field.labels.instance:percentencode}"))]


def gpus() -> Panels:
    """Return the panels of GPUs of the nodes on which the run has ranks."""
    legend = "{{instance}} gpu {{gpu}}"
    absent = "Empty on nodes without an NVIDIA GPU."
    used = f"{metric('gpu_memory_used_bytes')} / {metric('gpu_memory_total_bytes')} {_ITS_NODES}"
    return [
        over_time(
            "GPU utilisation: lowest",
            f"Share of time in which a GPU ran at least one kernel, however small. {absent}",
            Target(f"bottomk($top, {metric('gpu_utilization_ratio')} {_ITS_NODES})", legend),
            unit=units.PercentUnit,
            span=8,
            top=1,
            links=_OPEN_NODE,
        ),
        over_time(
            "GPU memory used: highest",
            f"Share of a GPU's memory that is allocated, by any process on the node. {absent}",
            Target(busiest(used), legend),
            unit=units.PercentUnit,
            span=8,
            top=1,
            links=_OPEN_NODE,
        ),
        over_time(
            "GPU power: lowest",
            f"Power that each GPU draws; a drop is often the first sign of a GPU that waits. {absent}",
            Target(f"bottomk($top, {metric('gpu_power_watts')} {_ITS_NODES})", legend),
            unit=units.Watt,
            span=8,
            links=_OPEN_NODE,
        ),
    ]


def nodes() -> Panels:
    """Return the panels of those nodes themselves."""
    pressure = f"rate({metric('node_pressure_seconds_total')}[$__rate_interval])"
    network = f"rate({metric('node_network_bytes_total')}[$__rate_interval])"
    disk = f"rate({metric('node_disk_bytes_total')}[$__rate_interval])"
    return [
        over_time(
            "CPU utilisation: highest",
            "Share of all cores of a node that are busy; near one, DataLoader workers starve.",
            Target(busiest(f"{metric('node_cpu_utilization_ratio')} {_ITS_NODES}"), "{{instance}}"),
            unit=units.PercentUnit,
            top=1,
            links=_OPEN_NODE,
        ),
        over_time(
            "Memory available: lowest",
            "Memory that a node can still give out without swapping.",
            Target(f"bottomk($top, {metric('node_memory_available_bytes')} {_ITS_NODES})", "{{instance}}"),
            unit=units.BytesIEC,
            links=_OPEN_NODE,
        ),
        over_time(
            "Pressure: highest",
            "Share of time in which some or all tasks of a node wait for a resource. Empty where the kernel "
            "gives no pressure stall information.",
            Target(busiest(f"{pressure} {_ITS_NODES}"), "{{instance}} {{resource}} {{kind}}"),
            unit=units.PercentUnit,
            links=_OPEN_NODE,
        ),
        over_time(
            "Network and disk: highest",
            "Bytes per second over a node's network interfaces and disks.",
            Target(busiest(f"{network} {_ITS_NODES}"), "{{instance}} network {{direction}}"),
            Target(busiest(f"{disk} {_ITS_NODES}"), "{{instance}} disk {{direction}}"),
            unit=units.BytesPerSecondIEC,
            links=_OPEN_NODE,
        ),
    ]


def profiler() -> Panels:
    """Return the panels of captures on them, and the cost of the client."""
    return [
        over_time(
            "Captures",
            "Captures since a node's daemon started, by who asked for them and how they ended. A total and "
            "not a rate, because a rate misses the first. Empty until the first capture.",
            Target(
                f"sum by (trigger, result) ({metric('capture_requests_total')} {_ITS_NODES})",
                "{{trigger}} {{result}}",
            ),
            unit=units.NoUnit,
        ),
        over_time(
            "Captures in progress",
            "Captures in progress on the run's nodes; steps are slower while one runs.",
            Target(f"sum({metric('capture_active')} {_ITS_NODES})", "captures"),
            unit=units.NoUnit,
        ),
        over_time(
            "Overhead of the client",
            "What torchperfd costs a rank, as it estimates: of the ranks with most. Empty until it has an "
            "estimate.",
            Target(busiest(metric("client_overhead_ratio", RANKS)), LEGEND),
            unit=units.PercentUnit,
            warn_above=threshold("TorchperfdClientOverhead"),
            links=OPEN_RANK,
        ),
        over_time(
            "Detail given up",
            "Tiers of detail that a rank's client has given up to keep within the overhead allowed. Empty "
            "until it has an estimate of what it costs.",
            Target(busiest(metric("client_shed_tiers", RANKS)), LEGEND),
            unit=units.NoUnit,
            links=OPEN_RANK,
        ),
    ]
