"""Renders goodput as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any, Final, TextIO

from torchperfd.model.formatting import duration
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput

SCHEMA: Final = "torchperfd.goodput/1"

_NAMES: Final = {
    Bucket.START_UP: "start-up",
    Bucket.PRODUCTIVE: "productive steps",
    Bucket.DATA_WAIT: "data wait",
    Bucket.COMMUNICATION_WAIT: "communication wait",
    Bucket.VALIDATION: "validation",
    Bucket.CHECKPOINT: "checkpoint",
    Bucket.STALL: "stall",
    Bucket.RESTART_GAP: "restart gap",
    Bucket.SHUTDOWN: "shutdown",
}
_LABEL_WIDTH: Final = 20


def to_dict(runs: Sequence[RunGoodput]) -> dict[str, Any]:
    """Return the document of schema :data:`SCHEMA`."""
    return {"schema": SCHEMA, "runs": [_run_dict(run) for run in runs]}


def render_text(runs: Sequence[RunGoodput], out: TextIO, zone: tzinfo | None = None) -> None:
    """Write one table per run; dates are in the given time zone, by default the local one."""
    for number, run in enumerate(runs):
        if number:
            out.write("\n")
        for line in _run_lines(run, zone):
            out.write(f"{line}\n")


def _run_dict(run: RunGoodput) -> dict[str, Any]:
    gpu_hours = run.gpu_hours
    lost = None
    if gpu_hours is not None:
        lost = {bucket.value: hours for bucket, hours in gpu_hours.items() if bucket is not Bucket.PRODUCTIVE}
    return {
        "run": run.run,
        "since_unix_seconds": run.since_unix_seconds,
        "until_unix_seconds": run.until_unix_seconds,
        "restarts": run.restarts,
        "goodput_ratio": run.ratio,
        "rank_seconds": run.total_seconds,
        "bucket_seconds": _by_name(run.seconds),
        "lost_gpu_hours": lost,
        "ranks": [
            {
                "rank": rank.rank,
                "running": rank.running,
                "since_unix_seconds": rank.since_unix_seconds,
                "until_unix_seconds": rank.until_unix_seconds,
                "starts": rank.starts,
                "gpus": rank.gpus,
                "goodput_ratio": rank.ratio,
                "bucket_seconds": _by_name(rank.seconds),
            }
            for rank in run.ranks
        ],
    }


def _run_lines(run: RunGoodput, zone: tzinfo | None) -> Iterator[str]:
    ranks, restarts = len(run.ranks), run.restarts
    since = datetime.fromtimestamp(run.since_unix_seconds, zone).strftime("%Y-%m-%d %H:%M:%S")
    yield (
        f"{run.run}: goodput {run.ratio:.1%} of {duration(run.total_seconds)} of rank time,"
        f" {ranks} rank{_s(ranks)}, {restarts} restart{_s(restarts)}, since {since}"
    )
    hours = run.gpu_hours
    yield f"  {'BUCKET':<{_LABEL_WIDTH}} {'TIME':>11} {'SHARE':>7}" + (f" {'GPU HOURS':>10}" if hours else "")
    for bucket, seconds in run.seconds.items():
        share = seconds / run.total_seconds if run.total_seconds else 0.0
        line = f"  {_NAMES[bucket]:<{_LABEL_WIDTH}} {duration(seconds):>11} {share:>7.1%}"
        yield line + (f" {hours[bucket]:>10.2f}" if hours else "")
    if ranks > 1:
        yield f"  {'RANK':<{_LABEL_WIDTH}} {'TIME':>11} {'GOODPUT':>7}  MOST LOST TO"
        for rank in run.ranks:
            yield (
                f"  {rank.rank:<{_LABEL_WIDTH}} {duration(rank.total_seconds):>11} {rank.ratio:>7.1%}"
                f"  {_worst(rank)}"
            )


def _worst(rank: RankGoodput) -> str:
    losses = {bucket: seconds for bucket, seconds in rank.seconds.items() if bucket is not Bucket.PRODUCTIVE}
    worst = max(losses, key=losses.__getitem__)
    return f"{_NAMES[worst]} ({duration(losses[worst])})" if losses[worst] else "-"


def _by_name(seconds: Mapping[Bucket, float]) -> dict[str, float]:
    return {bucket.value: value for bucket, value in seconds.items()}


def _s(count: int) -> str:
    return "" if count == 1 else "s"
