"""The dashboard of one node and its GPUs."""

from typing import Final

from grafana.config import HARDWARE_THROTTLING, HARDWARE_XIDS, metric, threshold
from grafana.layout import DAEMON, NODE, RANK, Panels, Row, address, build, label_values, top
from grafana.panels import Column, Link, Target, now, over_time, rows_of
from grafana.queries import busiest, rate
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

_AT: Final = 'instance="$instance"'
_GPUS: Final = f'{_AT},gpu=~"$gpu"'
_ABSENT: Final = "Empty on a node without an NVIDIA GPU."
_HIDDEN: Final = "Empty where the daemon cannot see the ranks' processes."
_GPU: Final = "gpu {{gpu}}"


def node_dashboard() -> model.Dashboard:
    """Build the dashboard."""
    return build(
        NODE,
        "What limits this node: CPUs, memory, disks, network, or one of its GPUs?",
        [
            label_values("instance", "Node", metric("build_info")),
            label_values("gpu", "GPU", metric("gpu_up", _AT), many=True, numeric=True),
            top(),
        ],
        [
            Row("Now", _now()),
            Row("GPUs", _gpus()),
            Row("Clocks and heat", _clocks()),
            Row("Host", _host()),
            Row("Ranks of the node", _ranks()),
            Row("GPU units and links", _units(), collapsed=True),
            Row("GPU errors", _errors(), collapsed=True),
        ],
    )


def _now() -> Panels:
    memory = f"{metric('node_memory_available_bytes', _AT)} / {metric('node_memory_total_bytes', _AT)}"
    return [
        now(
            "CPU in use",
            "Share of all CPUs of the node that are busy.",
            Target(metric("node_cpu_utilization_ratio", _AT), ""),
            unit=units.PercentUnit,
            span=4,
            warn_above=0.9,
        ),
        now(
            "Memory left",
            "Share of memory that the node can still give out without swapping.",
            Target(memory, ""),
            unit=units.PercentUnit,
            span=4,
            warn_below=threshold("TorchperfdNodeMemoryNearlyFull"),
        ),
        now(
            "Ranks",
            "Ranks that report to the node's daemon. Empty while none does.",
            Target(f"count({metric('train_rank_info', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
        ),
        now(
            "GPUs",
            f"GPUs and MIG instances of the node. {_ABSENT}",
            Target(f"count({metric('gpu_up', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
        ),
        now(
            "GPUs lost",
            f"GPUs that the driver does not reach any more. {_ABSENT}",
            Target(f"sum(1 - {metric('gpu_up', _AT)})", ""),
            unit=units.NoUnit,
            span=4,
            warn_above=1,
        ),
        now(
            "Power of all GPUs",
            f"Power that all GPUs of the node draw. {_ABSENT}",
            Target(f"sum({metric('gpu_power_watts', _AT)})", ""),
            unit=units.Watt,
            span=4,
        ),
    ]


def _gpus() -> Panels:
    used = f"{metric('gpu_memory_used_bytes', _GPUS)} / {metric('gpu_memory_total_bytes', _GPUS)}"
    info = f"max by (gpu, model, driver_version) ({metric('gpu_info', _GPUS)})"
    return [
        over_time(
            "GPU utilisation",
            f"Share of time in which a GPU ran at least one kernel, however small. {_ABSENT}",
            Target(busiest(metric("gpu_utilization_ratio", _GPUS)), _GPU),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "GPU memory in use",
            f"Share of a GPU's memory that any process holds. {_ABSENT}",
            Target(busiest(used), _GPU),
            unit=units.PercentUnit,
            top=1,
            warn_above=threshold("TorchperfdGpuMemoryNearlyFull"),
        ),
        over_time(
            "GPU power",
            f"Power that each GPU draws; a drop is often the first sign of a GPU that waits. {_ABSENT}",
            Target(busiest(metric("gpu_power_watts", _GPUS)), _GPU),
            unit=units.Watt,
        ),
        rows_of(
            "GPUs and their owners",
            f"Model and driver of each GPU, and how many owners a scheduler gave it to. {_ABSENT}",
            Column("", info),
            Column("owners", f"count by (gpu) ({metric('gpu_allocation_info', _GPUS)})"),
            keys={"gpu": [], "model": [], "driver_version": []},
            span=12,
            height=8,
        ),
    ]


def _clocks() -> Panels:
    held = f'{_GPUS},reason=~"{HARDWARE_THROTTLING}"'
    return [
        over_time(
            "SM clock",
            f"Clock of the processors of each GPU. {_ABSENT}",
            Target(busiest(metric("gpu_clock_hertz", f'{_GPUS},domain="sm"')), _GPU),
            unit=units.Hertz,
        ),
        over_time(
            "Temperature",
            f"Temperature of each GPU and, where it is measured, of its memory. {_ABSENT}",
            Target(busiest(metric("gpu_temperature_celsius", _GPUS)), "gpu {{gpu}} {{sensor}}"),
            unit=units.Celsius,
        ),
        over_time(
            "Hardware throttling",
            "Share of time in which heat or a power brake holds down clocks. Empty while no GPU is slowed.",
            Target(
                busiest(rate("gpu_throttle_seconds_total", held, "gpu, reason") + " > 0"),
                "gpu {{gpu}} {{reason}}",
            ),
            unit=units.PercentUnit,
            points=True,
            warn_above=threshold("TorchperfdGpuThrottled"),
        ),
        over_time(
            "All throttling by reason",
            f"Seconds per second, summed over GPUs; the software power cap is normal under load. {_ABSENT}",
            Target(rate("gpu_throttle_seconds_total", _GPUS, "reason"), "{{reason}}"),
            unit=units.NoUnit,
        ),
    ]


def _host() -> Panels:
    return [
        over_time(
            "CPU utilisation",
            "Share of all CPUs of the node that are busy; near one, DataLoader workers starve.",
            Target(metric("node_cpu_utilization_ratio", _AT), "busy"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Memory available",
            "Memory that the node can still give out without swapping, and what it has in all.",
            Target(metric("node_memory_available_bytes", _AT), "available"),
            Target(metric("node_memory_total_bytes", _AT), "total"),
            unit=units.BytesIEC,
        ),
        over_time(
            "Pressure",
            "Share of time in which some or all tasks wait for a resource. Empty where the kernel gives no "
            "pressure stall information.",
            Target(rate("node_pressure_seconds_total", _AT, "resource, kind"), "{{resource}} {{kind}}"),
            unit=units.PercentUnit,
        ),
        over_time(
            "Network and disk",
            "Bytes per second over the node's network interfaces and disks.",
            Target(rate("node_network_bytes_total", _AT, "direction"), "network {{direction}}"),
            Target(rate("node_disk_bytes_total", _AT, "direction"), "disk {{direction}}"),
            unit=units.BytesPerSecondIEC,
        ),
        over_time(
            "Disk busy",
            "Seconds per second in which a disk had requests to serve, summed over disks.",
            Target(rate("node_disk_busy_seconds_total", _AT), "busy"),
            unit=units.NoUnit,
        ),
    ]


def _ranks() -> Panels:
    link = [
        Link(
            "Open rank",
            address(
                RANK,
                run="${__field.labels.run:percentencode}",
                rank="${__field.labels.rank:percentencode}",
            ),
        )
    ]
    legend = "{{run}} rank {{rank}}"
    return [
        over_time(
            "CPUs of ranks",
            f"CPUs that each rank and its workers use. {_HIDDEN}",
            Target(busiest(rate("process_cpu_seconds_total", _AT, "run, rank")), legend),
            unit=units.NoUnit,
            links=link,
        ),
        over_time(
            "Memory of ranks",
            f"Memory of each rank and its workers. {_HIDDEN}",
            Target(busiest(f"sum by (run, rank) ({metric('process_resident_memory_bytes', _AT)})"), legend),
            unit=units.BytesIEC,
            links=link,
        ),
        over_time(
            "Ready and without a CPU",
            f"Share of time in which a rank's main thread could run and had no CPU. {_HIDDEN}",
            Target(busiest(rate("process_run_delay_seconds_total", _AT, "run, rank")), legend),
            unit=units.PercentUnit,
            links=link,
        ),
        rows_of(
            "Ranks and their GPUs",
            "Every rank of the node. A click on a rank opens its dashboard. Empty while no rank reports.",
            Column("", f"max by (run, rank, gpu_uuid) ({metric('train_rank_info', _AT)})"),
            keys={
                "rank": [
                    Link(
                        "Open rank",
                        address(
                            RANK,
                            run="${__data.fields.run:percentencode}",
                            rank="${__data.fields.rank:percentencode}",
                        ),
                    )
                ],
                "run": [],
                "gpu_uuid": [],
            },
            span=12,
            height=8,
        ),
    ]


def _units() -> Panels:
    return [
        over_time(
            "Units at work",
            f"Share of each kind of unit in use, mean over the chosen GPUs; from Hopper on. {_ABSENT}",
            *(
                Target(f"avg({metric(f'gpu_{name}_ratio', _GPUS)})", legend)
                for name, legend in (
                    ("sm_active", "SM active"),
                    ("sm_occupancy", "SM occupancy"),
                    ("tensor_active", "tensor cores"),
                    ("dram_active", "memory"),
                )
            ),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "PCIe and NVLink",
            f"Bytes per second over the links of the chosen GPUs, together. {_ABSENT}",
            Target(rate("gpu_pcie_bytes_total", _GPUS, "direction"), "PCIe {{direction}}"),
            Target(rate("gpu_nvlink_bytes_total", _GPUS, "direction"), "NVLink {{direction}}"),
            unit=units.BytesPerSecondIEC,
        ),
    ]


def _errors() -> Panels:
    xids = metric("gpu_xid_last_timestamp_seconds", f'{_GPUS},xid=~"{HARDWARE_XIDS}"')
    return [
        over_time(
            "ECC errors",
            f"Memory errors since the driver was loaded, by whether they were corrected. {_ABSENT}",
            Target(
                busiest(metric("gpu_ecc_errors_total", f'{_GPUS},scope="volatile"')), "gpu {{gpu}} {{type}}"
            ),
            unit=units.NoUnit,
        ),
        over_time(
            "Row remapping",
            f"GPUs with a remapping of memory rows that is pending or has failed. {_ABSENT}",
            Target(f"sum({metric('gpu_row_remap_pending', _GPUS)})", "pending"),
            Target(f"sum({metric('gpu_row_remap_failure', _GPUS)})", "failed"),
            unit=units.NoUnit,
        ),
        now(
            "Since the last XID of the hardware",
            "Age of the newest XID that points to hardware or firmware. Empty without such an XID.",
            Target(f"time() - {xids}", "gpu {{gpu}} XID {{xid}}"),
            unit=units.Seconds,
            span=12,
            text=common_model.BigValueTextMode.VALUE_AND_NAME,
            links=[Link("Daemon of the node", address(DAEMON, instance="${instance:percentencode}"))],
        ),
    ]
