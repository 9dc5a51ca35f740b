"""Conversion of the times by which ranks are compared, from messages; commands need no more to show ranks."""

import itertools
from collections.abc import Sequence

import numpy as np

from torchperfd.model.messages import unpack
from torchperfd.model.totals import Placed
from torchperfd.v1 import control_pb2
from torchperfd_daemon.diagnosis.detect.straggler import RankWork
from torchperfd_daemon.diagnosis.evidence import Comparison, compare
from torchperfd_daemon.store.model import rank_in


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
    return compare(_works_from_messages(messages), [device_work_from_message(each) for each in messages])


def _works_from_messages(messages: Sequence[control_pb2.RankSteps]) -> list[RankWork]:
    """Unpack the phases of many ranks, as :func:`rank_work_from_message`: all columns at once."""
    packed = [column.ns for message in messages for column in message.phases]
    seconds = np.frombuffer(b"".join(packed), "<i8") / 1e9
    ends = itertools.accumulate(len(column) // seconds.itemsize for column in packed)
    columns = (seconds[begin:end] for begin, end in itertools.pairwise((0, *ends)))
    return [
        RankWork(
            message.status.identity.rank,
            {column.phase: next(columns) for column in message.phases},
            _stage_from_message(message),
        )
        for message in messages
    ]


def _stage_from_message(message: control_pb2.RankSteps) -> int | None:
    if not message.status.coordinates:
        return None
    return rank_in("pipeline", unpack(message.status, Placed).coordinates)
