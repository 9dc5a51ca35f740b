"""Scenarios of runs."""

from typing import Final

from grafana.alerting import Case, Firing


def _of(run: str, **ranks: str) -> dict[str, str]:
    """Return series by short names: `steps_0` is the steps of rank 0, `data_1` its phase data."""
    names = {
        "last": "train_last_step_timestamp_seconds",
        "steps": "train_steps_total",
        "seconds": "train_step_seconds_total",
        "excess": "train_straggler_excess_seconds",
        "ready": "train_dataloader_ready_batches",
        "world": "train_world_size",
        "info": "train_rank_info",
        "overhead": "client_overhead_ratio",
    }
    phases = ("data", "forward", "validate")
    series = {}
    for short, values in ranks.items():
        kind, _, rank = short.rpartition("_")
        if kind in phases:
            name, more = "train_phase_seconds_total", f',phase="{kind}"'
        elif kind in names:
            name, more = names[kind], ""
        else:
            name, more = "train_state", f',state="{kind}"'
        series[f'torchperfd_{name}{{run="{run}",rank="{rank}"{more}}}'] = values
    return series


def _hooks(run: str, rank: int, hooks: str, instance: str = "a") -> str:
    return f'torchperfd_train_rank_info{{instance="{instance}",run="{run}",rank="{rank}",hooks="{hooks}"}}'


def _goodput(run: str, **buckets: str) -> dict[str, str]:
    return {
        f'torchperfd_train_goodput_seconds_total{{run="{run}",bucket="{bucket}"}}': values
        for bucket, values in buckets.items()
    }


_STALLED: Final = (
    # Rank 0 stops at 5 min, when the newest step has timestamp 301; both step again at 30 min.
    Case(
        "TorchperfdRunStalled",
        "a run that stops while training, then continues",
        _of(
            "hangs",
            last_0="1+60x5 301x23 1800+60x10",
            last_1="1+60x4 241x24 1800+60x10",
            training_0="1x40",
            training_1="1x40",
            validating_1="0x40",
        ),
        {"15m": (), "17m": (Firing({"run": "hangs"}, "11m 59s"),), "30m": ()},
    ),
    Case(
        "TorchperfdRunStalled",
        "one rank that still steps keeps the run alive",
        _of("uneven", last_0="1x40", last_1="1+60x40", training_0="1x40", training_1="1x40"),
        {"40m": ()},
    ),
    # Every run here made its last step at second 1 and is evaluated about 40 min later.
    Case(
        "TorchperfdRunStalled",
        "runs that rightly make no steps",
        _of("validates", last_0="1x40", validating_0="1x40", last_1="1x40", training_1="1x40")
        | _of("checkpoints", last_0="1x40", checkpointing_0="1x40", last_1="1x40", training_1="1x40")
        | _of("finished", last_0="1x40", finished_0="1x40", training_0="0x40")
        | _of("starts", last_0="0x40", training_0="1x40"),
        {"40m": ()},
    ),
    Case(
        "TorchperfdRunStalled",
        "the first minutes after a long validation",
        _of("resumes", last_0="1x32 1980+60x10", validating_0="1x29 0x13", training_0="0x29 1x13"),
        {"32m": (), "40m": ()},
    ),
)

_HANG: Final = (
    Case(
        "TorchperfdRunHang",
        "a run that hangs for five minutes",
        {'torchperfd_train_verdict{run="stuck",cause="hang"}': "_x4 1x5 stale"},
        {"3m": (), "8m": (Firing({"run": "stuck"}),), "15m": ()},
    ),
    Case(
        "TorchperfdRunHang",
        "a run that is slow",
        {'torchperfd_train_verdict{run="slow",cause="input-bound"}': "1x20"},
        {"15m": ()},
    ),
)

_MISSING: Final = (
    Case(
        "TorchperfdRanksMissing",
        "a node without a daemon",
        _of("half", world_0="4x30", world_1="4x30", info_0="1x30", info_1="1x30", training_0="1x30"),
        {"5m": (), "15m": (Firing({"run": "half"}, "2"),)},
    ),
    Case(
        "TorchperfdRanksMissing",
        "a complete run, and one that ends rank by rank",
        _of("whole", world_0="2x30", world_1="2x30", info_0="1x30", info_1="1x30")
        | _of("ends", world_0="2x30", info_0="1x30", info_1="1x5 stale", finished_0="0x5 1x25"),
        {"15m": (), "25m": ()},
    ),
)

_STRAGGLER: Final = (
    # Rank 1 exceeds its peers by 0.2 s of steps of 1 s, for 20 min.
    Case(
        "TorchperfdStraggler",
        "a rank that the others wait for, then no longer",
        _of(
            "uneven",
            steps_0="0+60x40",
            seconds_0="0+60x40",
            steps_1="0+60x40",
            seconds_1="0+60x40",
            excess_1="0.2x20 stale",
        ),
        {"5m": (), "15m": (Firing({"run": "uneven", "rank": "1"}, "20%"),), "30m": ()},
    ),
    Case(
        "TorchperfdStraggler",
        "a rank that is hardly late",
        _of("even", steps_0="0+60x40", seconds_0="0+60x40", excess_0="0.05x40"),
        {"30m": ()},
    ),
)

_INPUT: Final = (
    # 30 s of each 60 s of step time go to data for 20 min, then 6 s.
    Case(
        "TorchperfdRunInputBound",
        "a run that waits for data, then no longer",
        _of("hungry", data_0="0+30x20 606+6x20", forward_0="0+30x20 654+54x20", seconds_0="0+60x40"),
        {"10m": (), "12m": (Firing({"run": "hungry"}, "50%"),), "30m": ()},
    ),
    # One rank of four waits half of its time: an eighth of the run's. Validation is no part of the step.
    # A run that stands still has no share at all. Six minutes of waiting are no alert yet.
    Case(
        "TorchperfdRunInputBound",
        "runs that are not input bound",
        _of(
            "straggler", data_0="0+30x40", seconds_0="0+60x40", seconds_1="0+60x40", seconds_2="0+60x40",
            seconds_3="0+60x40",
        )
        | _of("validates", validate_0="0+50x40", data_0="0+1x40", seconds_0="0+10x40")
        | _of("still", data_0="9x40", seconds_0="10x40")
        | _of("warms up", data_0="0+50x6 300+1x34", seconds_0="0+60x40"),
        {"12m": (), "40m": ()},
    ),
    # Of four ranks, two have an empty queue and wait for half of the time, for 20 min. Batches are ready
    # for rank 2, which waits for something else, and rank 3 has no workers at all.
    Case(
        "TorchperfdLoaderStarving",
        "loaders that starve, then no longer",
        _of(
            "starves", ready_0="0x20 2x20", data_0="0+30x40", seconds_0="0+60x40",
            ready_1="0x20 2x20", data_1="0+30x40", seconds_1="0+60x40",
            ready_2="4x40", data_2="0+30x40", seconds_2="0+60x40",
            data_3="0+30x40", seconds_3="0+60x40",
        ),
        {"9m": (), "12m": (Firing({"run": "starves"}, "2"),), "30m": ()},
    ),
    # The queue is empty and the batch there at once; a batch waits now and then; a run stands still.
    Case(
        "TorchperfdLoaderStarving",
        "loaders that do no harm",
        _of("quick", ready_0="0x40", data_0="0+1x40", seconds_0="0+60x40")
        | _of("so so", ready_0="0 0 1 " * 13, data_0="0+30x40", seconds_0="0+60x40")
        | _of("still", ready_0="0x40", data_0="9x40", seconds_0="10x40"),
        {"38m": ()},
    ),
)  # fmt: skip

_SPEED: Final = (
    # Steps of 1 s for two hours, then of 2 s.
    Case(
        "TorchperfdRunRegressed",
        "a run whose steps become twice as long",
        _of("slows", steps_0="0+60x120 7230+30x60", seconds_0="0+60x180"),
        {"119m": (), "145m": (Firing({"run": "slows"}, "200%"),)},
    ),
    Case(
        "TorchperfdRunRegressed",
        "a steady run, and a young one that slows down",
        _of("steady", steps_0="0+60x180", seconds_0="0+60x180")
        | _of("young", steps_0="_x140 0+60x10 630+30x30", seconds_0="_x140 0+60x40"),
        {"100m": (), "179m": ()},
    ),
    Case(
        "TorchperfdGoodputLow",
        "a run that spends half of its time stalled",
        _goodput("half", productive="0+30x150", stall="0+30x150"),
        {"50m": (), "120m": (Firing({"run": "half"}, "50%"),)},
    ),
    Case(
        "TorchperfdGoodputLow",
        "a productive run, and one that starts",
        _goodput("busy", productive="0+57x150", checkpoint="0+3x150")
        | _goodput("starts", start_up="_x90 0+60x30", productive="_x90 0x30"),
        {"60m": (), "120m": ()},
    ),
    Case(
        "TorchperfdCheckpointSlow",
        "a run that saves for a third of its time, then for a sixtieth",
        _goodput("saves", productive="0+40x60 2459+59x60", checkpoint="0+20x60 1201+1x60"),
        {"10m": (), "50m": (Firing({"run": "saves"}, "33.33%"),), "110m": ()},
    ),
    Case(
        "TorchperfdCheckpointSlow",
        "a run that saves at times",
        _goodput("saves", productive="0+58x60", checkpoint="0+2x60"),
        {"50m": ()},
    ),
    # Rank 1 alone costs too much, for 20 min; then it gives up detail.
    Case(
        "TorchperfdClientOverhead",
        "a client that costs too much, then gives up detail",
        _of("tiny steps", overhead_0="0.002x40", overhead_1="0.03x20 0.004x20"),
        {"9m": (), "12m": (Firing({"run": "tiny steps"}, "3%"),), "30m": ()},
    ),
    Case(
        "TorchperfdClientOverhead",
        "a single bad minute",
        _of("one bad minute", overhead_0="0.002x10 0.02 0.002x29"),
        {"12m": (), "30m": ()},
    ),
    # Two daemons show rank 1 for a moment, and it counts once; the run ends at 20 min.
    Case(
        "TorchperfdSlowHooks",
        "two ranks of three without compiled hooks, until the run ends",
        {
            _hooks("slow", 0, "native"): "1x20",
            _hooks("slow", 1, "reference"): "1x20",
            _hooks("slow", 1, "reference", "b"): "1x20",
            _hooks("slow", 2, "reference"): "1x20",
        },
        {"9m": (), "12m": (Firing({"run": "slow"}, "2"),), "30m": ()},
    ),
    Case(
        "TorchperfdSlowHooks",
        "compiled hooks, and a client too old to report them",
        {_hooks("fast", 0, "native"): "1x40", _hooks("fast", 1, ""): "1x40"},
        {"30m": ()},
    ),
    Case(
        "TorchperfdClientSkew",
        "old clients on two nodes, until the run ends",
        {
            'torchperfd_train_unsupported_clients{instance="a",run="old"}': "2x20",
            'torchperfd_train_unsupported_clients{instance="b",run="old"}': "1x20",
        },
        {"9m": (), "12m": (Firing({"run": "old"}, "3"),), "30m": ()},
    ),
    Case(
        "TorchperfdClientSkew",
        "clients that the daemon supports",
        {'torchperfd_train_unsupported_clients{instance="a",run="new"}': "0x40"},
        {"30m": ()},
    ),
)

RUNS: Final = (*_STALLED, *_HANG, *_MISSING, *_STRAGGLER, *_INPUT, *_SPEED)
