"""``torchperfd capture``, once or at intervals."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from torchperfd.model.capture_options import CaptureKind
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd.v1.contract import AUTOMATIC_CAPTURE_S
from torchperfd_cli.commands._capture_progress import conclude, watched
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import (
    AGE,
    Seconds,
    fleet_option,
    json_option,
    one_run_option,
    socket_option,
)
from torchperfd_cli.commands._output import emit, note
from torchperfd_cli.commands._scope import job_option, unreachable_text, whole_run
from torchperfd_daemon.diagnosis.verdict import Cause
from torchperfd_daemon.errors import (
    DaemonUnreachableError,
    DeadlineError,
    IncompatibleVersionError,
    NoSuchTargetError,
    PartialResultError,
    TorchperfdError,
    UsageError,
)
from torchperfd_daemon.views.model import capture_state, parse_ranks


def repeat(
    seconds: float,
    once: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run an action now and at every interval after, until Ctrl-C.

    Failures are printed, and retried at the next interval. An interval that ends before the previous action
    is skipped: two never run at once.

    Raises:
        PartialResultError: Some have failed.
        TorchperfdError: It can never succeed: the target has ended, or is invalid.
    """
    began = clock()
    done = failed = 0
    try:
        while True:
            try:
                once()
            except (UsageError, NoSuchTargetError, IncompatibleVersionError):
                raise
            except TorchperfdError as error:
                failed += 1
                note(f"torchperfd: {error}")
            done += 1
            passed = clock() - began
            sleep((math.floor(passed / seconds) + 1) * seconds - passed)
    except KeyboardInterrupt:
        note(f"{done} made, {failed} of them failed or are partial")
    if failed:
        raise PartialResultError(f"{failed} of {done} failed or are partial")


_STEPS: Final = 5
_TIMEOUT_S: Final = 60.0
_DAY_S: Final = 86_400.0
_ASK_TIMEOUT_S: Final = 5.0
_IS_IT_TRAINING: Final = "is the job training? see `torchperfd ps`"
_RECORDED: Final = {
    "--record-shapes": "Record the shapes of operator inputs.",
    "--with-stack": "Record Python stacks.",
    "--profile-memory": "Record allocations.",
    "--with-flops": "Record what FLOPs are counted from: shapes and scalars.",
    "--with-modules": "Record which module runs, and with it Python stacks.",
}
"""Options of torch.profiler, by their names there."""


def _recording_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, words in reversed(_RECORDED.items()):
        command = click.option(name, is_flag=True, help=words)(command)
    return command


@click.command("capture")
@one_run_option
@click.option("--all", "all_runs", is_flag=True, help="Every run of the node, at the same time.")
@click.option("--ranks", default="", metavar="0,8-15", help="Which ranks; all by default.")
@click.option("--steps", type=click.IntRange(1, 1000), help=f"How many training steps.  [default: {_STEPS}]")
@click.option("--duration", type=AGE, help="Instead of --steps, as many steps as last this long, like 10s.")
@click.option("--at-step", type=click.IntRange(0, 2**62), help="Start exactly at this step, counting from 0.")
@_recording_options
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in CaptureKind]),
    default=CaptureKind.TRACE.value,
    show_default=True,
    help="What: a trace by torch.profiler, or a snapshot of CUDA memory with its history.",
)
@click.option("--queue", is_flag=True, help="Wait for a capture in progress rather than fail.")
@click.option(
    "--timeout",
    type=Seconds(1, _DAY_S),
    help=f"Seconds to wait for the steps.  [default: {_TIMEOUT_S:.0f}, and twice the duration]",
)
@click.option("--every", type=AGE, help="Repeat at this interval until Ctrl-C, like 10m.")
@job_option
@fleet_option
@socket_option
@json_option
def capture_command(
    run: str,
    all_runs: bool,
    ranks: str,
    steps: int | None,
    duration: float | None,
    at_step: int | None,
    kind: str,
    queue: bool,
    timeout: float | None,
    every: float | None,
    job: str,
    fleet: bool,
    socket: str | None,
    as_json: bool,
    **recorded: bool,
) -> None:
    """Profile the next steps of a running job; the job continues meanwhile.

    All chosen ranks agree on the steps beforehand. The traces are Chrome traces, one per rank.
    With --fleet or --job, the ranks on all nodes.
    """
    _check(run or job, steps, duration, every, all_runs=all_runs)
    timeout = timeout or min(_DAY_S, _TIMEOUT_S + 2 * (duration or 0.0))
    request = control_pb2.CaptureRequest(
        run=run,
        ranks=parse_ranks(ranks),
        options=session_pb2.CaptureOptions(
            steps=steps or _STEPS,
            kind=session_pb2.CaptureKind.Value(f"CAPTURE_KIND_{kind.upper()}"),
            **recorded,
        ),
        timeout_seconds=timeout,
        at_step=at_step,
        duration_seconds=duration or 0.0,
        queue=queue,
        all_runs=all_runs,
        fleet=fleet,
        job=job,
    )
    if every is None:
        _capture(request, socket, as_json=as_json)
    else:
        repeat(every, lambda: _capture(request, socket, as_json=as_json))


def _capture(request: control_pb2.CaptureRequest, socket: str | None, *, as_json: bool) -> None:
    ended = _follow(request, socket, as_json=as_json)
    if as_json:
        emit(_documents(ended) if request.all_runs else _document(ended[0]))
    else:
        for message in ended:
            conclude(message)
    missing = unreachable_text(peer for message in ended for peer in message.unreachable)
    if missing:
        note(missing)
    _raise_unless_complete(ended, lambda run: _hang(run, socket))


def _check(
    chosen: str, steps: int | None, duration: float | None, every: float | None, *, all_runs: bool
) -> None:
    if every is not None and every < 1:
        raise UsageError("captures cannot be less than a second apart", "write --every like 10m")
    if steps is not None and duration is not None:
        raise UsageError("--steps and --duration exclude each other", "leave one out")
    if duration is not None and not 0 < duration <= _DAY_S:
        raise UsageError("a capture's duration must be up to a day", "write it like 10s")
    if all_runs and chosen:
        raise UsageError("--all excludes --run and --job", "leave one out")


def _follow(
    request: control_pb2.CaptureRequest, socket: str | None, *, as_json: bool
) -> list[control_pb2.CaptureProgress]:
    """Return the last message on each capture, in the order they began."""
    newest: dict[tuple[str, str], control_pb2.CaptureProgress] = {}
    # The daemon keeps the deadline; ours is only there in case it hangs. A queue may take any time.
    deadline = None if request.queue else request.timeout_seconds + AUTOMATIC_CAPTURE_S + 60
    try:
        with connect(socket) as daemon:
            request.run = whole_run(daemon, request.run, fleet=request.fleet, job=request.job)
            messages: Iterable[control_pb2.CaptureProgress] = daemon.Capture(request, timeout=deadline)
            for message in messages if as_json else watched(messages):
                newest[message.run, message.capture_id] = message
    except DaemonUnreachableError as error:
        if not newest:
            raise
        raise DaemonUnreachableError(
            "the daemon ended during the capture",
            "start it again; `torchperfd captures list` then shows what the ranks wrote",
        ) from error
    if not newest:
        raise TorchperfdError("the daemon ended the capture without a result", "see its log")
    return list(newest.values())


def _hang(run: str, socket: str | None) -> str:
    """Return the verdict on a run if it is a hang, and the next command; else empty."""
    try:
        with connect(socket) as daemon:
            asked = control_pb2.DiagnoseRequest(run=run)
            [verdict] = daemon.Diagnose(asked, timeout=_ASK_TIMEOUT_S).verdicts
    except (TorchperfdError, ValueError):
        return ""
    return f"{verdict.summary}; `{verdict.next_command}`" if verdict.cause == Cause.HANG.value else ""


def _raise_unless_complete(ended: list[control_pb2.CaptureProgress], hang_of: Callable[[str], str]) -> None:
    lacking = [each for each in ended if each.state != control_pb2.CAPTURE_STATE_COMPLETE]
    if not lacking:
        return
    worst = lacking[0]
    name = f"capture {worst.capture_id}" if worst.capture_id else f"the capture of run {worst.run}"
    more = f" (and {len(lacking) - 1} more captures)" if len(lacking) > 1 else ""
    if worst.state == control_pb2.CAPTURE_STATE_PARTIAL:
        raise PartialResultError(f"{name} is partial: {worst.reason}{more}")
    problem = f"{name} failed: {worst.reason}{more}"
    if len(lacking) < len(ended) or any(each.state == control_pb2.CAPTURE_STATE_PARTIAL for each in lacking):
        raise PartialResultError(problem)
    if worst.timed_out:
        hang = hang_of(worst.run)
        raise DeadlineError(problem, f"the run hangs: {hang}" if hang else _IS_IT_TRAINING)
    raise TorchperfdError(problem)


def _documents(ended: list[control_pb2.CaptureProgress]) -> dict[str, Any]:
    return {
        "schema": "torchperfd.capture_results/1",
        "captures": [_document(message) for message in ended],
    }


def _document(progress: control_pb2.CaptureProgress) -> dict[str, Any]:
    agreed = any(rank.file for rank in progress.ranks) or progress.start_step
    return {
        "schema": "torchperfd.capture_result/1",
        "capture_id": progress.capture_id,
        "run": progress.run,
        "state": capture_state(progress.state),
        "reason": progress.reason,
        "directory": progress.directory,
        "step_range": [progress.start_step, progress.start_step + progress.steps] if agreed else None,
        "ranks": [
            {
                "rank": rank.rank,
                "state": capture_state(rank.state),
                "reason": rank.reason,
                "path": f"{progress.directory}/{rank.file}" if rank.file and not rank.node else None,
                **({"node": rank.node} if rank.node else {}),
                "bytes": rank.bytes,
                "sha256": rank.sha256,
                "pause_seconds": round(rank.pause_seconds, 3),
                "launches": rank.launches,
                "kernels": rank.kernels,
            }
            for rank in progress.ranks
        ],
    }
