"""The dashboard of one run: what it spends its time on, which rank is slow, and on which hardware."""

from typing import Final

from grafana.config import metric, threshold
from grafana.layout import RANK, RUN, Panels, Row, address, build, label_values, top
from grafana.panels import Column, Link, Target, bars, now, over_time, rows_of
from grafana.queries import (
    busiest,
    increase,
    lost_gpus,
    missing,
    own_work,
    per,
    phase_seconds,
    ranks,
    rate,
    step_seconds,
    steps,
)
from grafana.run_nodes import LEGEND, OPEN_RANK, RANKS, gpus, nodes, profiler
from grafana.run_nodes import RUN as OF_RUN
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units

_GOODPUT: Final = "train_goodput_seconds_total"
_NO_CUDA: Final = "Empty without a CUDA device."


def run_dashboard() -> model.Dashboard:
    """Build the dashboard with its rows in the order in which questions come up."""
    info = "train_rank_info"
    return build(
        RUN,
        "Why is this training slow, and which rank is to blame?",
        [
            label_values("run", "Run", metric(info)),
            label_values("rank", "Rank", metric(info, OF_RUN), many=True, numeric=True),
            top(),
        ],
        [
            Row("Now", _now()),
            Row("Where the time goes", _time()),
            Row("Ranks", _ranks()),
            Row("Throughput and use of the device", _throughput()),
            Row("Loader, memory and optimizer", _detail(), collapsed=True),
            Row("GPUs of the run's nodes", gpus(), collapsed=True),
            Row("Nodes of the run", nodes(), collapsed=True),
            Row("Captures and client", profiler(), collapsed=True),
        ],
    )


def _now() -> Panels:
    return [
        now(
            "Verdict",
            "What the daemon holds to be the main cause of lost time. Empty until a run made enough steps.",
            Target(f"max by (cause) ({metric('train_verdict', OF_RUN)}) > 0", "{{cause}}"),
            unit=units.NoUnit,
            span=4,
            text=common_model.BigValueTextMode.NAME,
        ),
        now(
            "Ranks by state",
            "How many ranks are starting, training, validating, checkpointing or finished.",
            Target(f"count by (state) ({metric('train_state', OF_RUN)} == 1)", "{{state}}"),
            unit=units.NoUnit,
            span=4,
            text=common_model.BigValueTextMode.VALUE_AND_NAME,
        ),
        now(
            "Ranks missing",
            "Ranks of the run that no scraped daemon reports.",
            Target(missing(OF_RUN), ""),
            unit=units.NoUnit,
            span=4,
            warn_above=1,
        ),
        now(
            "Since the last step",
            "Time since any rank of the run finished a training step.",
            Target(f"time() - max({metric('train_last_step_timestamp_seconds', OF_RUN)} > 0)", ""),
            unit=units.Seconds,
            span=4,
            warn_above=threshold("TorchperfdRunStalled"),
        ),
        now(
            "Step time lost to data",
            "Share of the run's training step time that its ranks spend waiting for the next batch.",
            Target(per(phase_seconds("data", OF_RUN), step_seconds(OF_RUN)), ""),
            unit=units.PercentUnit,
            span=4,
            warn_above=threshold("TorchperfdRunInputBound"),
        ),
        now(
            "Goodput",
            "Productive share of the run's rank-seconds in the time range. Empty until time was settled.",
            Target(per(increase(_GOODPUT, f'{OF_RUN},bucket="productive"'), increase(_GOODPUT, OF_RUN)), ""),
            unit=units.PercentUnit,
            span=4,
            warn_below=threshold("TorchperfdGoodputLow"),
        ),
    ]


def _time() -> Panels:
    training = f'{RANKS},phase!="validate"'
    phases = "train_phase_seconds_total"
    return [
        over_time(
            "Phases of a step",
            "Share of each phase in the training step time, all chosen ranks together. Phases are exclusive "
            "host time and add up to the step; validation is not part of a step.",
            Target(
                f"{rate(phases, training, 'phase')} / on () group_left () ({step_seconds(RANKS)} > 0)",
                "{{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        over_time(
            "Account of a step",
            "Mean time per step of each of its parts, which sum to the step: computing by phase, each loss "
            "that has a name, and the kinds of waiting. Daemons of several nodes are averaged; the rank "
            "selection is ignored. Empty until there is a verdict with an account.",
            Target(f"avg by (part, name) ({metric('train_step_part_seconds', OF_RUN)})", "{{part}} {{name}}"),
            unit=units.Seconds,
            stacked=True,
        ),
        over_time(
            "Wall time by phase",
            "Seconds of each phase, validation included, per second and rank. What is missing to one is "
            "time outside of any step.",
            Target(f"{rate(phases, RANKS, 'phase')} / on () group_left () {ranks(RANKS, '')}", "{{phase}}"),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        over_time(
            "Step duration quantiles",
            "Duration of single training steps over all ranks of the run, from a histogram: estimates "
            "between bucket bounds. It ignores the rank selection.",
            *(
                Target(
                    f"histogram_quantile({quantile}, "
                    f"{rate('train_step_duration_seconds_bucket', OF_RUN, 'le')})",
                    legend,
                )
                for quantile, legend in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
            ),
            unit=units.Seconds,
        ),
        over_time(
            "Beside the steps",
            "Seconds per second and rank that go into saves between steps, and into pauses of Python's "
            "garbage collector. Empty until one of them occurred.",
            *(
                Target(f"{rate(f'train_{name}_seconds_total', RANKS)} / {ranks(RANKS, '')}", legend)
                for name, legend in (("checkpoint", "checkpoints"), ("gc", "garbage collector"))
            ),
            unit=units.PercentUnit,
        ),
        over_time(
            "Rank time by use",
            "Share of the run's rank-seconds by what they went to; productive is goodput. Empty until time "
            "was settled.",
            Target(
                f"{rate(_GOODPUT, OF_RUN, 'bucket')} / on () group_left () ({rate(_GOODPUT, OF_RUN)} > 0)",
                "{{bucket}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            top=1,
        ),
        bars(
            "GPU-hours lost by cause",
            "Rank-hours lost in the time range to each cause, while its verdict was published. Empty while "
            "no cause was found.",
            Target(f"{lost_gpus('increase({}[$__range])', OF_RUN)} / 3600", "{{cause}}"),
            unit=units.Hours,
        ),
    ]


def _ranks() -> Panels:
    by_rank = own_work(RANKS, "rank")
    data = per(phase_seconds("data", RANKS, "rank"), step_seconds(RANKS, "rank"), "rank")
    return [
        over_time(
            "Own work per step: spread over ranks",
            "Mean step time less the time in collective_wait, over all chosen ranks. A highest line far "
            "above the median is a rank that the others wait for.",
            *(
                Target(f"quantile({quantile}, {by_rank})", legend)
                for quantile, legend in ((0, "lowest"), (0.5, "median"), (0.95, "95 %"), (1, "highest"))
            ),
            unit=units.Seconds,
        ),
        over_time(
            "Own work per step: slowest ranks",
            "The ranks with most own work at each moment. The rank that stands out upwards is the one that "
            "the others wait for.",
            Target(busiest(by_rank), LEGEND),
            unit=units.Seconds,
            links=OPEN_RANK,
        ),
        over_time(
            "Step time lost to data: worst ranks",
            "Share of a rank's training step time that it waits for the next batch. In synchronous training "
            "one such rank makes all others wait for it in collective_wait.",
            Target(busiest(data), LEGEND),
            unit=units.PercentUnit,
            warn_above=threshold("TorchperfdRunInputBound"),
            links=OPEN_RANK,
        ),
        over_time(
            "Ranks that the others wait for",
            "Own work per step above the peers' median, beyond chance. Empty while no rank stands out.",
            Target(busiest(metric("train_straggler_excess_seconds", RANKS)), LEGEND),
            unit=units.Seconds,
            links=OPEN_RANK,
        ),
        rows_of(
            "All ranks",
            "One row for each chosen rank; sort by a column to find the one that differs. A click on a rank "
            "opens its dashboard.",
            Column("own work", by_rank, units.Seconds),
            Column("step", per(step_seconds(RANKS, "rank"), steps(RANKS, "rank"), "rank"), units.Seconds),
            Column("steps/s", steps(RANKS, "rank")),
            Column("data", data, units.PercentUnit, threshold("TorchperfdRunInputBound")),
            Column(
                "last step",
                f"time() - max by (rank) ({metric('train_last_step_timestamp_seconds', RANKS)} > 0)",
                units.Seconds,
                threshold("TorchperfdRunStalled"),
            ),
            keys={
                "rank": [
                    Link(
                        "Open rank",
                        address(RANK, run="${run:percentencode}", rank="${__data.fields.rank:percentencode}"),
                    )
                ]
            },
        ),
    ]


def _throughput() -> Panels:
    return [
        over_time(
            "Steps per second",
            "Training steps per second of wall time: the slowest and the fastest of the chosen ranks.",
            Target(f"min({steps(RANKS, 'rank')})", "slowest rank"),
            Target(f"max({steps(RANKS, 'rank')})", "fastest rank"),
            unit=units.CountsPerSecond,
            span=8,
        ),
        over_time(
            "Samples per second",
            "Samples that the chosen ranks train on per second of wall time, together; zero where the batch "
            "size is not known.",
            Target(rate("train_samples_total", RANKS), "samples"),
            unit=units.CountsPerSecond,
            span=8,
        ),
        over_time(
            "Tokens per second",
            "Tokens that the chosen ranks train on per second of wall time, together. Empty unless the "
            "script reports how many there are.",
            Target(rate("train_tokens_total", RANKS), "tokens"),
            unit=units.CountsPerSecond,
            span=8,
        ),
        over_time(
            "Time on the device per step, by phase",
            "Mean time that phases take on the device, without the calls that were not timed there. It "
            "passes beside the host's time and is not added to it: a forward that is short here and long "
            f"there waits for the host. {_NO_CUDA}",
            Target(
                f"{rate('train_phase_device_seconds_total', RANKS, 'phase')}"
                f" / on () group_left () ({steps(RANKS)} > 0)",
                "{{phase}}",
            ),
            unit=units.Seconds,
            stacked=True,
        ),
        over_time(
            "Model FLOPs utilisation",
            "Part of their devices' peak that the ranks' recent training steps make use of (MFU). Empty "
            "where the FLOPs of a step or the peak are not known.",
            *(
                Target(
                    f"quantile({quantile}, {metric('train_model_flops_utilization_ratio', RANKS)})", legend
                )
                for quantile, legend in ((0, "lowest"), (0.5, "median"), (1, "highest"))
            ),
            unit=units.PercentUnit,
            top=1,
        ),
    ]


def _detail() -> Panels:
    skipped = rate("train_skipped_optimizer_steps_total", RANKS, "rank")
    micro_batches = rate("train_micro_batches_total", RANKS, "rank")
    by_steps = f"({steps(RANKS, 'rank')} > 0)"
    return [
        over_time(
            "Batches ready",
            "Batches that wait in a DataLoader's workers when the loop asks for one, of the ranks with "
            "fewest: at zero the workers are slower than the step. Empty without workers.",
            Target(f"bottomk($top, {metric('train_dataloader_ready_batches', RANKS)})", LEGEND),
            unit=units.NoUnit,
            links=OPEN_RANK,
        ),
        over_time(
            "CUDA memory",
            "Device memory of tensors, the most that they ever had, and what torch keeps from the device for "
            f"them: of the rank with most. {_NO_CUDA}",
            *(
                Target(f"max({metric(f'train_cuda_{name}_bytes', RANKS)})", name)
                for name in ("allocated", "peak", "reserved")
            ),
            unit=units.BytesIEC,
        ),
        over_time(
            "Optimizer steps skipped",
            "Optimizer steps per training step that were called off, by a GradScaler or with their gradients "
            "zeroed unused. Empty until a step went backward.",
            Target(busiest(f"{skipped} / {by_steps}"), LEGEND),
            unit=units.PercentUnit,
            links=OPEN_RANK,
        ),
        over_time(
            "Micro-batches per step",
            "Batches that go backward in a training step; more than one where gradients accumulate. Empty "
            "until a step went backward.",
            Target(busiest(f"{micro_batches} / {by_steps}"), LEGEND),
            unit=units.NoUnit,
            links=OPEN_RANK,
        ),
    ]
