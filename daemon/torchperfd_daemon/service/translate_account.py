"""Conversion of a rank's cumulative account, and of goodput, between messages and the daemon's own types."""

from collections.abc import Mapping
from typing import Final

from torchperfd.model.messages import MAX_COUNT, pack, unpack
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.goodput.totals import Bucket, RankGoodput, RunGoodput
from torchperfd_daemon.store.model import KindTotal, Totals

_WHERE: Final = frozenset(("ring", "outbox"))
_ELSEWHERE: Final = "other"


def totals_from_message(message: session_pb2.Account) -> Totals:
    """Unpack a cumulative account; numbers out of range are limited, so that they harm this rank only."""
    kinds = {kind.kind: unpack(kind, KindTotal) for kind in message.kinds}
    return unpack(
        message,
        Totals,
        train=kinds.get(session_pb2.STEP_KIND_TRAIN, KindTotal()),
        validate=kinds.get(session_pb2.STEP_KIND_VALIDATE, KindTotal()),
        dropped=_dropped(message.dropped_steps),
    )


def totals_to_message(own: Totals) -> session_pb2.Account:
    """Pack a cumulative account."""
    kinds = {session_pb2.STEP_KIND_TRAIN: own.train, session_pb2.STEP_KIND_VALIDATE: own.validate}
    message = pack(
        session_pb2.Account,
        own,
        dropped_steps=own.dropped,
        kinds=[pack(session_pb2.KindAccount, kind_own, kind=kind) for kind, kind_own in kinds.items()],
    )
    if own.warmup.steps:
        message.warmup.kind = session_pb2.STEP_KIND_TRAIN
    return message


def _dropped(message: Mapping[str, int]) -> dict[str, int]:
    """Return lost steps by place; places unknown to this version are counted as one."""
    found: dict[str, int] = {}
    for where, steps in message.items():
        place = where if where in _WHERE else _ELSEWHERE
        found[place] = min(found.get(place, 0) + steps, MAX_COUNT)
    return found


def run_goodput_to_message(own: RunGoodput) -> control_pb2.RunGoodput:
    """Pack a run's goodput."""
    return control_pb2.RunGoodput(run=own.run, ranks=[_rank_goodput_to_message(rank) for rank in own.ranks])


def run_goodput_from_message(message: control_pb2.RunGoodput) -> RunGoodput:
    """Unpack a run's goodput; a bucket of a later version is left out."""
    return RunGoodput(message.run, [_rank_goodput_from_message(rank) for rank in message.ranks])


def _rank_goodput_to_message(own: RankGoodput) -> control_pb2.RankGoodput:
    seconds = {bucket.value: seconds for bucket, seconds in own.seconds.items()}
    return pack(control_pb2.RankGoodput, own, bucket_seconds=seconds)


def _rank_goodput_from_message(message: control_pb2.RankGoodput) -> RankGoodput:
    seconds = {bucket: message.bucket_seconds.get(bucket.value, 0.0) for bucket in Bucket}
    return unpack(message, RankGoodput, seconds=seconds)
