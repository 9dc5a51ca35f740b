"""The dashboard of one rank: its phases, its loader, its memory, its process and its GPU."""

from typing import Final

from grafana.config import metric, threshold
from grafana.layout import NODE, RANK, RUN, Panels, Row, address, build, label_values
from grafana.panels import Column, Link, Target, now, over_time, rows_of
from grafana.queries import per, phase_seconds, rate, step_seconds, steps
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

_OF: Final = 'run="$run",rank="$rank"'
_NO_LINKS: Final[list[Link]] = []
_NO_CUDA: Final = "Empty without a CUDA device."
_ITS_GPU: Final = (
    "* on (gpu_uuid) group_left () max by (gpu_uuid) ("
    + metric("train_rank_info", f'{_OF},gpu_uuid!=""')
    + ")"
)


def rank_dashboard() -> model.Dashboard:
    """Build the dashboard."""
    info = "train_rank_info"
    return build(
        RANK,
        "What does one rank spend its steps on, and what holds it up?",
        [
            label_values("run", "Run", metric(info)),
            label_values("rank", "Rank", metric(info, 'run="$run"'), numeric=True),
        ],
        [
            Row("Now", _now()),
            Row("Steps", _steps()),
            Row("Data loader and process", _process()),
            Row("Memory", _memory(), collapsed=True),
            Row("GPU of the rank", _gpu(), collapsed=True),
            Row("Client", _client(), collapsed=True),
        ],
    )


def _now() -> Panels:
    seconds, count = step_seconds(_OF), steps(_OF)
    identity = {
        "run": [Link("Run", address(RUN, run="${__data.fields.run:percentencode}"))],
        "instance": [Link("Node", address(NODE, instance="${__data.fields.instance:percentencode}"))],
        **dict.fromkeys(("job_name", "script", "framework", "torch_version", "gpu_uuid", "hooks"), _NO_LINKS),
    }
    return [
        now(
            "State",
            "What the rank does, as its client reports it.",
            Target(f"{metric('train_state', _OF)} == 1", "{{state}}"),
            unit=units.NoUnit,
            span=4,
            text=common_model.BigValueTextMode.NAME,
        ),
        now(
            "Since the last step",
            "Time since the rank finished a training step.",
            Target(f"time() - ({metric('train_last_step_timestamp_seconds', _OF)} > 0)", ""),
            unit=units.Seconds,
            span=4,
            warn_above=threshold("TorchperfdRunStalled"),
        ),
        now(
            "Steps per second",
            "Training steps per second of wall time.",
            Target(count, ""),
            unit=units.CountsPerSecond,
            span=4,
        ),
        now(
            "Step time",
            "Mean duration of a training step.",
            Target(per(seconds, count), ""),
            unit=units.Seconds,
            span=4,
        ),
        now(
            "Lost to data",
            "Share of step time in which the rank waits for the next batch.",
            Target(per(phase_seconds("data", _OF), seconds), ""),
            unit=units.PercentUnit,
            span=4,
            warn_above=threshold("TorchperfdRunInputBound"),
        ),
        now(
            "Behind its peers",
            "Own work per step above the peers' median, where the others wait for this rank. Empty while "
            "they do not.",
            Target(metric("train_straggler_excess_seconds", _OF), ""),
            unit=units.Seconds,
            span=4,
        ),
        rows_of(
            "Identity",
            "The rank's script, node, framework and versions. A click on the instance opens its node.",
            Column("", f"max by ({', '.join(identity)}) ({metric('train_rank_info', _OF)})"),
            keys=identity,
            height=4,
        ),
    ]


def _steps() -> Panels:
    phases = "train_phase_seconds_total"
    training = f'{_OF},phase!="validate"'
    return [
        over_time(
            "Phases of a step",
            "Share of each phase in the training step time. Phases are exclusive host time and add up to the "
            "step; validation is not part of a step.",
            Target(
                f"{rate(phases, training, 'phase')} / on () group_left () ({step_seconds(_OF)} > 0)",
                "{{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        over_time(
            "Seconds of each phase per step",
            "Mean host time of each phase in one training step.",
            Target(
                f"{rate(phases, training, 'phase')} / on () group_left () ({steps(_OF)} > 0)", "{{phase}}"
            ),
            unit=units.Seconds,
            stacked=True,
        ),
        over_time(
            "Time on the device per step, by phase",
            f"Mean time that phases take on the device. It passes beside the host's time. {_NO_CUDA}",
            Target(
                f"{rate('train_phase_device_seconds_total', _OF, 'phase')}"
                f" / on () group_left () ({steps(_OF)} > 0)",
                "{{phase}}",
            ),
            unit=units.Seconds,
            stacked=True,
        ),
        over_time(
            "Beside the steps",
            "Seconds per second that go into saves between steps, and into pauses of Python's garbage "
            "collector. Empty until one of them occurred.",
            Target(rate("train_checkpoint_seconds_total", _OF), "checkpoints"),
            Target(rate("train_gc_seconds_total", _OF), "garbage collector"),
            unit=units.PercentUnit,
        ),
    ]


def _process() -> Panels:
    return [
        over_time(
            "Batches ready",
            "Batches that wait in the DataLoader's workers when the loop asks for one: at zero the workers "
            "are slower than the step. Empty without workers.",
            Target(metric("train_dataloader_ready_batches", _OF), "ready"),
            unit=units.NoUnit,
        ),
        over_time(
            "CPU",
            "CPUs that the rank and its workers use, and the limit of its control group. Empty for a rank "
            "whose process the daemon cannot see.",
            Target(rate("process_cpu_seconds_total", _OF), "used"),
            Target(metric("process_cpu_limit_cores", _OF), "limit"),
            unit=units.NoUnit,
        ),
        over_time(
            "Waits for a CPU",
            "Share of time in which the main thread is ready and has no CPU, and in which the CPU quota "
            "holds the rank back. Empty for a rank whose process the daemon cannot see.",
            Target(rate("process_run_delay_seconds_total", _OF), "no CPU"),
            Target(rate("process_throttled_seconds_total", _OF), "quota"),
            unit=units.PercentUnit,
        ),
        over_time(
            "Storage",
            "Bytes per second that storage moves for the rank and its workers. Empty for a rank whose "
            "process the daemon cannot see.",
            Target(rate("process_io_bytes_total", _OF, "direction"), "{{direction}}"),
            unit=units.BytesPerSecondIEC,
        ),
    ]


def _memory() -> Panels:
    return [
        over_time(
            "CUDA memory",
            "Device memory of tensors, the most that they ever had, and what torch keeps from the device for "
            f"them. {_NO_CUDA}",
            *(
                Target(metric(f"train_cuda_{name}_bytes", _OF), name)
                for name in ("allocated", "peak", "reserved")
            ),
            unit=units.BytesIEC,
        ),
        over_time(
            "Memory of the process",
            "Memory of the rank and its workers, and the limit of its control group. Empty for a rank whose "
            "process the daemon cannot see.",
            Target(metric("process_resident_memory_bytes", _OF), "used"),
            Target(metric("process_memory_limit_bytes", _OF), "limit"),
            unit=units.BytesIEC,
        ),
    ]


def _gpu() -> Panels:
    absent = "Empty without an NVIDIA GPU, or while the rank's GPU is not known."
    return [
        over_time(
            "Utilisation",
            f"Share of time with a kernel running, and with tensor cores at work. {absent}",
            Target(f"{metric('gpu_utilization_ratio')} {_ITS_GPU}", "any kernel"),
            Target(f"{metric('gpu_tensor_active_ratio')} {_ITS_GPU}", "tensor cores"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "Model FLOPs utilisation",
            "Part of its device's peak that the rank's recent steps make use of (MFU). Empty where the FLOPs "
            "of a step or the peak are not known.",
            Target(metric("train_model_flops_utilization_ratio", _OF), "MFU"),
            unit=units.PercentUnit,
            top=1,
        ),
        over_time(
            "SM clock",
            f"Clock of the rank's GPU; a drop under load is throttling. {absent}",
            Target(metric("gpu_clock_hertz", 'domain="sm"') + f" {_ITS_GPU}", "clock"),
            unit=units.Hertz,
        ),
        over_time(
            "Power",
            f"Power that the rank's GPU draws. {absent}",
            Target(f"{metric('gpu_power_watts')} {_ITS_GPU}", "power"),
            unit=units.Watt,
        ),
    ]


def _client() -> Panels:
    return [
        over_time(
            "Overhead of the client",
            "What torchperfd costs the rank, as it estimates. Empty until it has an estimate.",
            Target(metric("client_overhead_ratio", _OF), "overhead"),
            unit=units.PercentUnit,
            warn_above=threshold("TorchperfdClientOverhead"),
        ),
        over_time(
            "Hooks",
            "One for each hook into torch that is on, zero for one that is not. Empty for a simulated rank.",
            Target(metric("client_hook_active", _OF), "{{hook}}"),
            unit=units.NoUnit,
            top=1,
        ),
    ]
