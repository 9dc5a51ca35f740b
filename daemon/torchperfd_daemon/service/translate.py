"""Conversion between messages and the daemon's own types; the only module that uses both."""

import sys
from array import array
from collections.abc import Mapping, Sequence
from operator import add
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchperfd.model.capture_options import CaptureKind
from torchperfd.model.formatting import one_line
from torchperfd.model.messages import LAST_STEP, LAST_UNIX_NS, MAX_COUNT, MAX_NS, pack, unpack
from torchperfd.model.process import Coordinate
from torchperfd.model.totals import MAX_PHASES
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.captures.attempt import MAX_STEPS, Progress
from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureRecord, CaptureState, RankFacts
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.store.model import (
    LAST_RANK,
    ArrivalColumns,
    RankIdentity,
    State,
    StepColumns,
    coordinates_text,
)
from torchperfd_daemon.store.store import Rank

_STATES = {session_pb2.RunState.Value(f"RUN_STATE_{each.name}"): each for each in State}
_STATES_OUT = {state: value for value, state in _STATES.items()}
_CAPTURE_STATES = {
    each: control_pb2.CaptureState.Value(f"CAPTURE_STATE_{each.name}") for each in CaptureState
}
_HIGHEST_BYTE = 7 if sys.byteorder == "little" else 0
_TRAINING = array("q", (session_pb2.STEP_KIND_TRAIN,))
_MAX_LABEL_CHARACTERS = 200
_MAX_PHASE_CHARACTERS = 64
MAX_REASON_CHARACTERS = 500
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
    if message.rank > LAST_RANK:
        raise BadMessageError(f"no run has a rank {message.rank}")
    return unpack(message, RankIdentity)


def state_from_message(value: int) -> State | None:
    """Return a state this version knows, else None."""
    return _STATES.get(session_pb2.RunState.ValueType(value))


def clean_label(name: str) -> str:
    """Return a name, such as that of a framework, as a label can hold it."""
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
        one_line(column.phase, _MAX_PHASE_CHARACTERS): _column(column.ns, batch.count)
        for column in batch.phases[:MAX_PHASES]
    }
    if kinds != _TRAINING * batch.count:
        wanted = np.asarray(kinds) == session_pb2.STEP_KIND_TRAIN
        starts, durations = _pick(starts, wanted), _pick(durations, wanted)
        phases = {name: _pick(column, wanted) for name, column in phases.items()}
    (ends,) = _within([_ends(starts, durations)], LAST_UNIX_NS)
    durations, *columns = _within([durations, *phases.values()], MAX_NS)
    phases = dict(zip(phases, columns, strict=True))
    arrivals = _arrivals_from_message(batch.arrivals) if batch.HasField("arrivals") else ArrivalColumns()
    return StepColumns(ends, durations, phases, arrivals, min(batch.next_step, MAX_COUNT))


def rank_status_to_message(rank: Rank) -> control_pb2.RankStatus:
    return pack(
        control_pb2.RankStatus,
        rank.totals,
        identity=pack(session_pb2.RankIdentity, rank.identity),
        state=_STATES_OUT[rank.state],
        connected=rank.connected,
        steps=rank.totals.train.steps,
        step_seconds=rank.mean_step_seconds(),
        last_step_unix_seconds=rank.last_step_unix_seconds,
        phase_seconds=rank.mean_phase_seconds(),
        dropped_steps=sum(rank.totals.dropped.values()),
        stalled_seconds=rank.stalled_seconds,
        stopped=rank.stopped,
        uid=rank.process.uid,
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


def device_phases_to_messages(work: RankWork | None) -> list[session_pb2.PhaseColumn]:
    """Pack a rank's phases on its device."""
    if work is None:
        return []
    return [
        session_pb2.PhaseColumn(phase=name, ns=(column * 1e9).astype("<i8").tobytes())
        for name, column in work.phase_seconds.items()
    ]


def rank_account_to_message(rank: Rank) -> control_pb2.RankAccount:
    return control_pb2.RankAccount(
        identity=pack(session_pb2.RankIdentity, rank.identity),
        state=_STATES_OUT[rank.state],
        account=translate_diagnosis.totals_to_message(rank.totals),
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
    if request.at_step > LAST_STEP:
        raise UsageError(f"no run makes {request.at_step} steps")
    if request.all_runs and (request.run or request.job):
        raise UsageError("all runs and those of one name cannot both be meant")


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
        client_version=clean_label(client_version),
        job_name=own.job_name,
        world_size=own.world_size,
        uid=uid,
        coordinates=coordinates_text(coordinates),
    )


def progress_to_message(progress: Progress) -> control_pb2.CaptureProgress:
    """Pack a capture's progress."""
    record: CaptureRecord = progress.record
    return pack(
        control_pb2.CaptureProgress,
        record,
        state=_CAPTURE_STATES[record.state],
        start_step=record.step_range[0] if record.step_range else 0,
        directory=str(progress.folder),
        timed_out=progress.timed_out,
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
    return pack(
        session_pb2.CaptureOrderResult,
        record,
        order_id=order_id,
        state=record.state.value,
        ended=record.state.ended,
        directory=str(progress.folder),
        start_step=first,
        steps=after - first,
        ranks=[
            pack(
                session_pb2.OrderedRank,
                rank,
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
    if (np.frombuffer(message.step, "<u8") > LAST_STEP).any():
        raise BadMessageError("an arrival at a step that no run makes")
    first, last = _within([_column(message.first_ns, count), _column(message.last_ns, count)], LAST_UNIX_NS)
    return ArrivalColumns(steps, first, last)


def _column(blob: bytes, count: int) -> "array[int]":
    if len(blob) != 8 * count:
        raise BadMessageError(f"a column of {count} steps has {len(blob)} bytes")
    column = array("q", blob)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _pick(column: "array[int]", wanted: "npt.NDArray[np.bool_]") -> "array[int]":
    return array("q", np.asarray(column)[wanted].tobytes())


def _ends(starts: "array[int]", durations: "array[int]") -> "array[int]":
    try:
        # A batch has few steps, and numpy's calls cost more than these sums.
        return array("q", map(add, starts, durations))
    except OverflowError as error:
        raise BadMessageError("a step ends after the end of time") from error


def _within(columns: "list[array[int]]", most: int) -> "list[array[int]]":
    """Return columns of int64 with every value from 0 to ``most``; the same ones where all are already."""
    # All columns at once, by their highest bytes: those of numbers below 0 are the largest.
    if max(b"".join(columns)[_HIGHEST_BYTE::8], default=0) < most >> 56:
        return columns
    return [array("q", np.clip(np.asarray(column), 0, most).tobytes()) for column in columns]
