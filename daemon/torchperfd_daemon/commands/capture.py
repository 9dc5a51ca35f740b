"""``torchperfd capture``."""

import json
import re
from typing import Any, Final

import click

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.commands._daemon import connect
from torchperfd_daemon.commands._options import Seconds, json_option, socket_option
from torchperfd_daemon.errors import DeadlineError, PartialResultError, TorchperfdError, UsageError

_RANKS: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST_RANKS: Final = 100_000


@click.command("capture")
@click.option("--run", default="", help="Which run; may be left out when there is only one.")
@click.option("--ranks", default="", metavar="0,8-15", help="Which ranks; all by default.")
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many training steps."
)
@click.option("--record-shapes", is_flag=True, help="Record the shapes of operator inputs.")
@click.option("--with-stack", is_flag=True, help="Record Python stacks.")
@click.option("--profile-memory", is_flag=True, help="Record allocations.")
@click.option(
    "--timeout",
    type=Seconds(1, 86400),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the steps.",
)
@socket_option
@json_option
def command(
    run: str,
    ranks: str,
    steps: int,
    record_shapes: bool,
    with_stack: bool,
    profile_memory: bool,
    timeout: float,
    socket: str | None,
    as_json: bool,
) -> None:
    """Profile the next steps of a running job; the job goes on meanwhile.

    All chosen ranks agree on the steps beforehand. The traces are Chrome traces, one per rank.
    """
    request = control_pb2.CaptureRequest(
        run=run,
        ranks=parse_ranks(ranks),
        options=session_pb2.CaptureOptions(
            steps=steps, record_shapes=record_shapes, with_stack=with_stack, profile_memory=profile_memory
        ),
        timeout_seconds=timeout,
    )
    last = None
    with connect(socket) as daemon:
        # The daemon keeps the deadline; ours is only there in case it dies.
        for progress in daemon.Capture(request, timeout=timeout + 60):
            last = progress
            if not as_json:
                _tell(progress, steps)
    if last is None:
        raise TorchperfdError("the daemon ended the capture without a word", "look into its log")
    if as_json:
        click.echo(json.dumps(_document(last, steps)))
    if last.state == control_pb2.CAPTURE_STATE_PARTIAL:
        raise PartialResultError(f"capture {last.capture_id} is partial: {last.reason}")
    if last.timed_out:
        raise DeadlineError(
            f"capture {last.capture_id} failed: {last.reason}", "is the job training? see `torchperfd ps`"
        )
    if last.state != control_pb2.CAPTURE_STATE_COMPLETE:
        raise TorchperfdError(f"capture {last.capture_id} failed: {last.reason}")


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that a list such as ``0,8-15`` names, in order.

    Raises:
        UsageError: It is no such list, or names more than 100,000.
    """
    ranks: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        match = _RANKS.fullmatch(part)
        if match is None:
            raise UsageError(f"{part[:40]!r} is no rank or range of ranks", "write them like 0,8-15")
        first, final = int(match[1]), int(match[2] or match[1])
        if final < first:
            raise UsageError(f"{part!r} is no range of ranks", "write them like 0,8-15")
        ranks.update(range(first, min(final, first + _MOST_RANKS) + 1))
        if len(ranks) > _MOST_RANKS:
            raise UsageError(f"these are more than {_MOST_RANKS:,} ranks", "leave --ranks out for all")
    return sorted(ranks)


def _tell(progress: control_pb2.CaptureProgress, steps: int) -> None:
    last_step = progress.start_step + steps - 1
    if progress.state == control_pb2.CAPTURE_STATE_PREPARING:
        click.echo(f"capture {progress.capture_id}: preparing {len(progress.ranks)} rank(s)", err=True)
    elif progress.state == control_pb2.CAPTURE_STATE_ARMED:
        click.echo(f"agreed on steps {progress.start_step} to {last_step}", err=True)
    else:
        for rank in progress.ranks:
            if rank.file:
                click.echo(f"{progress.directory}/{rank.file}")
        if progress.state == control_pb2.CAPTURE_STATE_COMPLETE:
            click.echo(
                f"complete: steps {progress.start_step} to {last_step};"
                f" next: torchperfd analyze {progress.directory}",
                err=True,
            )


def _document(progress: control_pb2.CaptureProgress, steps: int) -> dict[str, Any]:
    agreed = any(rank.file for rank in progress.ranks) or progress.start_step
    return {
        "schema": "torchperfd.capture_result/1",
        "capture_id": progress.capture_id,
        "state": _state(progress.state),
        "reason": progress.reason,
        "directory": progress.directory,
        "step_range": [progress.start_step, progress.start_step + steps] if agreed else None,
        "ranks": [
            {
                "rank": rank.rank,
                "state": _state(rank.state),
                "reason": rank.reason,
                "path": f"{progress.directory}/{rank.file}" if rank.file else None,
                "bytes": rank.bytes,
                "sha256": rank.sha256,
            }
            for rank in progress.ranks
        ],
    }


def _state(state: "control_pb2.CaptureState.ValueType") -> str:
    return control_pb2.CaptureState.Name(state).removeprefix("CAPTURE_STATE_").lower()
