"""Conversion between messages and the daemon's own types; the only module that uses both."""

import shlex
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchperfd.model.capture_options import CaptureKind
from torchperfd.model.process import Coordinate
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures import CaptureRecord, CaptureState, Progress, RankFacts, When
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.captures.rank_attempts import Ack, Result
from torchperfd_daemon.diagnosis.detect import RankWork
from torchperfd_daemon.diagnosis.evidence import Comparison, compare
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.service import translate_account, translate_diagnosis
from torchperfd_daemon.service.message_fields import LAST_UNIX_NS, MAX_NS, count, pack, total, unpack, within
from torchperfd_daemon.service.translate_account import MAX_PHASE_CHARACTERS, MAX_PHASES
from torchperfd_daemon.store import (
    ArrivalColumns,
    Rank,
    RankIdentity,
    State,
    StepColumns,
)
from torchperfd_daemon.store.model import coordinates_text, rank_in
from torchperfd_daemon.text import one_line

_STATES = {
    session_pb2.RUN_STATE_STARTING: State.STARTING,
    session_pb2.RUN_STATE_TRAINING: State.TRAINING,
    session_pb2.RUN_STATE_VALIDATING: State.VALIDATING,
    session_pb2.RUN_STATE_CHECKPOINTING: State.CHECKPOINTING,
    session_pb2.RUN_STATE_FINISHED: State.FINISHED,
}
_STATES_OUT = {state: value for value, state in _STATES.items()}
_CAPTURE_STATES = {
    CaptureState.PREPARING: control_pb2.CAPTURE_STATE_PREPARING,
    CaptureState.ARMED: control_pb2.CAPTURE_STATE_ARMED,
    CaptureState.COMPLETE: control_pb2.CAPTURE_STATE_COMPLETE,
    CaptureState.PARTIAL: control_pb2.CAPTURE_STATE_PARTIAL,
    CaptureState.FAILED: control_pb2.CAPTURE_STATE_FAILED,
    CaptureState.QUEUED: control_pb2.CAPTURE_STATE_QUEUED,
}
_TRAINING = array("q", (session_pb2.STEP_KIND_TRAIN,))
_MAX_LABEL_CHARACTERS = 200
_MAX_REASON_CHARACTERS = 500
_MAX_COMMAND_CHARACTERS = 4000
_SHORTEST_STEP_S = 1e-6
_LONGEST_STEP_S = 1e6
_LONGEST_PAUSE_S = 86_400.0
_LAST_RANK = 2**24
_LAST_PID = 2**22  # of Linux on 64 bits
_MOST_OF_NUMBER = {
    "world_size": _LAST_RANK,
    "local_rank": _LAST_RANK,
    "node_rank": _LAST_RANK,
    "process_start_ticks": 2**53,
}
_LAST_STEP = 2**62
_LONGEST_CAPTURE_S = 86_400.0


class BadMessageError(Exception):
    """A message that no client of ours would send."""


def identity_from_message(message: session_pb2.RankIdentity) -> RankIdentity:
    """Unpack a process's identity; its text ends up in metric labels and on terminals.

    Raises:
        BadMessageError: The run has no name, or the rank is none.
    """
    if not message.run:
        raise BadMessageError("the run has no name")
    if message.rank > _LAST_RANK:
        raise BadMessageError(f"no run has a rank {message.rank}")
    values = unpack(message, RankIdentity)
    values["command"] = _command(message.command)
    for name, value in values.items():
        if isinstance(value, str) and name != "command":
            values[name] = one_line(value, _MAX_LABEL_CHARACTERS)
    for name, most in _MOST_OF_NUMBER.items():
        values[name] = min(values[name], most)
    if values["pid"] > _LAST_PID:
        values["pid"] = 0
    return RankIdentity(**values)


def _command(words: str) -> str:
    """Return a command as it is safe to be pasted: every word quoted; empty if it is none.

    One that is cut off would be another command.
    """
    if len(words) > _MAX_COMMAND_CHARACTERS or not words.isprintable():
        return ""
    try:
        return shlex.join(shlex.split(words))
    except ValueError:
        return ""


def state_from_message(value: int) -> State | None:
    """Return a state this version knows, else None."""
    return _STATES.get(session_pb2.RunState.ValueType(value))


def clean_reason(words: str) -> str:
    """Return a reason in one line, such as an exception."""
    return one_line(words, _MAX_REASON_CHARACTERS)


def clean_framework(name: str) -> str:
    """Return the name of a framework as a label can hold it."""
    return one_line(name, _MAX_LABEL_CHARACTERS)


def training_steps_from_message(batch: session_pb2.StepBatch) -> StepColumns:
    """Unpack the training steps of a batch.

    Raises:
        BadMessageError: Columns of different lengths, or a step that ends after the end of time.
    """
    kinds = _column(batch.kind, batch.count)
    starts = _column(batch.start_ns, batch.count)
    durations = _column(batch.duration_ns, batch.count)
    phases = {
        one_line(column.phase, MAX_PHASE_CHARACTERS): _column(column.ns, batch.count)
        for column in batch.phases[:MAX_PHASES]
    }
    if kinds != _TRAINING * batch.count:
        wanted = np.asarray(kinds) == session_pb2.STEP_KIND_TRAIN
        starts, durations = _pick(starts, wanted), _pick(durations, wanted)
        phases = {name: _pick(column, wanted) for name, column in phases.items()}
    (ends,) = within([_ends(starts, durations)], LAST_UNIX_NS)
    durations, *columns = within([durations, *phases.values()], MAX_NS)
    phases = dict(zip(phases, columns, strict=True))
    return StepColumns(
        ends, durations, phases, _arrivals_from_message(batch.arrivals), count(batch.next_step)
    )


def rank_status_to_message(rank: Rank) -> control_pb2.RankStatus:
    """Pack a rank's status for ``ps``."""
    return control_pb2.RankStatus(
        identity=pack(session_pb2.RankIdentity, rank.identity),
        state=_STATES_OUT[rank.state],
        connected=rank.connected,
        steps=rank.totals.train.steps,
        step_seconds=rank.mean_step_seconds(),
        last_step_unix_seconds=rank.last_step_unix_seconds,
        phase_seconds=rank.mean_phase_seconds(),
        dropped_steps=total(*rank.totals.dropped.values()),
        stalled_seconds=rank.stalled_seconds,
        stopped=rank.stopped,
        loader=translate_account.loader_facts_to_message(own)
        if (own := rank.totals.loader) is not None
        else None,
        uid=rank.process.uid,
        coordinates=translate_account.coordinates_to_messages(rank.totals.coordinates),
        threads=rank.totals.threads,
        host_memory=None
        if rank.totals.host_memory is None
        else pack(session_pb2.HostMemory, rank.totals.host_memory),
    )


def runs_to_messages(own: Mapping[str, Sequence[Rank]]) -> list[control_pb2.Run]:
    """Pack the status of all runs for ``ps``."""
    return [
        control_pb2.Run(
            run=run,
            job_name=ranks[0].identity.job_name,
            world_size=max(rank.identity.world_size for rank in ranks),
            ranks=[rank_status_to_message(rank) for rank in ranks],
        )
        for run, ranks in own.items()
    ]


def rank_work_from_message(message: control_pb2.RankSteps) -> RankWork:
    """Unpack a rank's phases: seconds, one array per phase with a column for each step."""
    return RankWork(
        message.status.identity.rank,
        {column.phase: np.frombuffer(column.ns, "<i8") / 1e9 for column in message.phases},
        _stage_from_message(message),
    )


def device_work_from_message(message: control_pb2.RankSteps) -> RankWork | None:
    """Unpack a rank's phases on its device: mean seconds per step of each sample; None without any."""
    columns = {column.phase: np.frombuffer(column.ns, "<i8") / 1e9 for column in message.device_phases}
    if not columns:
        return None
    return RankWork(message.status.identity.rank, columns, _stage_from_message(message), are_means=True)


def comparison_from_messages(messages: Sequence[control_pb2.RankSteps]) -> Comparison:
    """Return the times by which a run's ranks are to be compared."""
    return compare(
        [rank_work_from_message(each) for each in messages],
        [device_work_from_message(each) for each in messages],
    )


def _stage_from_message(message: control_pb2.RankSteps) -> int | None:
    return rank_in("pipeline", translate_account.coordinates_from_messages(message.status.coordinates))


def device_phases_to_messages(work: RankWork | None) -> list[session_pb2.PhaseColumn]:
    """Pack a rank's phases on its device."""
    if work is None:
        return []
    return [
        session_pb2.PhaseColumn(phase=name, ns=(column * 1e9).astype("<i8").tobytes())
        for name, column in work.phase_seconds.items()
    ]


def rank_account_to_message(rank: Rank) -> control_pb2.RankAccount:
    """Pack a rank's whole account."""
    return control_pb2.RankAccount(
        identity=pack(session_pb2.RankIdentity, rank.identity),
        state=_STATES_OUT[rank.state],
        account=translate_account.totals_to_message(rank.totals),
        percentiles=translate_diagnosis.percentiles_to_messages(rank.history.newest(rank.steady_steps)),
        failure=rank.failure,
        failed_unix_seconds=rank.failed_unix_seconds,
    )


def check_capture(request: control_pb2.CaptureRequest) -> None:
    """Refuse a request for a capture with values out of range.

    Raises:
        UsageError: A value is out of range.
    """
    if not 1 <= request.options.steps <= MAX_STEPS:
        raise UsageError(f"steps must be 1 to {MAX_STEPS}")
    if not 0 <= request.duration_seconds <= _LONGEST_CAPTURE_S:
        raise UsageError("a capture's duration must be up to a day")
    if not 0 <= request.timeout_seconds <= _LONGEST_CAPTURE_S:
        raise UsageError("the timeout must be up to a day")
    if request.at_step > _LAST_STEP:
        raise UsageError(f"no run makes {request.at_step} steps")
    if request.all_runs and (request.run or request.job):
        raise UsageError("all runs and those of one name cannot both be meant")


def when_from_message(request: control_pb2.CaptureRequest) -> When:
    """Unpack which steps are wanted."""
    at_step = request.at_step if request.HasField("at_step") else None
    return When(at_step, request.duration_seconds)


def capture_options_from_message(message: session_pb2.CaptureOptions) -> CaptureOptions:
    """Unpack what to record; a kind that is not known is a trace."""
    return CaptureOptions.from_message(message, unknown=CaptureKind.TRACE)


def rank_facts(
    own: RankIdentity, client_version: str, uid: int | None, coordinates: Sequence[Coordinate]
) -> RankFacts:
    """Return the facts about a process on this node for a capture's manifest."""
    return RankFacts(
        node=own.node,
        pid=own.pid,
        torch_version=own.torch_version,
        python_version=own.python_version,
        client_version=one_line(client_version, _MAX_LABEL_CHARACTERS),
        job_name=own.job_name,
        world_size=own.world_size,
        uid=uid,
        coordinates=coordinates_text(coordinates),
    )


def ack_from_message(message: session_pb2.CaptureAck) -> Ack:
    """Unpack a rank's answer to prepare."""
    return Ack(
        message.ready,
        one_line(message.reason, _MAX_REASON_CHARACTERS),
        min(message.next_step, _LAST_STEP),
        min(max(message.step_seconds, _SHORTEST_STEP_S), _LONGEST_STEP_S)
        if message.step_seconds > 0
        else 0.0,
        _pause(message.pause_seconds_per_step),
    )


def result_from_message(message: session_pb2.CaptureResult) -> Result:
    """Unpack a rank's outcome."""
    return Result(
        ok=message.ok,
        reason=one_line(message.reason, _MAX_REASON_CHARACTERS),
        retry=message.retry,
        start_step=min(message.start_step, _LAST_STEP),
        file=one_line(message.file, 100).rpartition("/")[2],
        bytes=count(message.bytes),
        sha256=one_line(message.sha256, 64),
        steps=message.steps,
        steps_made=message.steps_made,
        pause_seconds=_pause(message.pause_seconds),
        launches=count(message.launches),
        kernels=count(message.kernels),
    )


def _pause(seconds: float) -> float:
    return seconds if 0 < seconds < _LONGEST_PAUSE_S else 0.0


def progress_to_message(progress: Progress) -> control_pb2.CaptureProgress:
    """Pack a capture's progress."""
    record: CaptureRecord = progress.record
    return control_pb2.CaptureProgress(
        capture_id=record.capture_id,
        state=_CAPTURE_STATES[record.state],
        reason=record.reason,
        start_step=record.step_range[0] if record.step_range else 0,
        directory=str(progress.folder),
        timed_out=progress.timed_out,
        run=record.run,
        steps=record.options.steps,
        ranks=[
            pack(
                control_pb2.CaptureRank,
                rank,
                state=_CAPTURE_STATES[rank.state],
                next_step=progress.next_steps.get(rank.rank, 0),
                node="",
            )
            for rank in record.ranks
        ],
    )


def order_result_to_message(
    order_id: int, progress: Progress, elsewhere: Mapping[int, str]
) -> session_pb2.CaptureOrderResult:
    """Pack the progress of a script's capture; ``elsewhere`` has the nodes of ranks on other nodes."""
    record = progress.record
    first, after = record.step_range or (0, 0)
    return session_pb2.CaptureOrderResult(
        order_id=order_id,
        capture_id=record.capture_id,
        state=record.state.value,
        ended=record.state.ended,
        reason=record.reason,
        directory=str(progress.folder),
        start_step=first,
        steps=after - first,
        ranks=[
            session_pb2.OrderedRank(
                rank=rank.rank,
                file=rank.file,
                reason=rank.reason,
                node=node_of_trace(progress.folder, rank.file, elsewhere.get(rank.rank, "")),
            )
            for rank in record.ranks
        ],
    )


def node_of_trace(folder: Path | str, file: str, node: str) -> str:
    """Return the other node that holds a rank's trace; empty if this node can read it."""
    return "" if file and Path(folder, file).is_file() else node


def _arrivals_from_message(message: session_pb2.Arrivals) -> ArrivalColumns:
    count = len(message.step) // 8
    steps = _column(message.step, count)
    # As unsigned numbers those below 0 are the largest.
    if (np.frombuffer(message.step, "<u8") > _LAST_STEP).any():
        raise BadMessageError("an arrival at a step that no run makes")
    first, last = within([_column(message.first_ns, count), _column(message.last_ns, count)], LAST_UNIX_NS)
    return ArrivalColumns(steps, first, last)


def _column(blob: bytes, count: int) -> "array[int]":
    if len(blob) != 8 * count:
        raise BadMessageError(f"a column of {count} steps has {len(blob)} bytes")
    column = array("q")
    column.frombytes(blob)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _pick(column: "array[int]", wanted: "npt.NDArray[np.bool_]") -> "array[int]":
    return array("q", np.asarray(column)[wanted].tobytes())


def _ends(starts: "array[int]", durations: "array[int]") -> "array[int]":
    first, took = np.asarray(starts), np.asarray(durations)
    ends = first + took
    # An overflowing sum has another sign than both of its parts.
    if ((first ^ ends) & (took ^ ends) < 0).any():
        raise BadMessageError("a step ends after the end of time")
    return array("q", ends.tobytes())
