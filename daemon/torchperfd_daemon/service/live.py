"""The daemon's newest data as messages: steps of its ranks, readings of its node."""

import sys
from array import array
from collections.abc import Iterable, Sequence

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.detect import RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.service import translate
from torchperfd_daemon.service.survey import DeviceWork, RecentCollections, ranks_of
from torchperfd_daemon.store import HISTORY_STEPS, Rank, Store


def newest_steps(
    store: Store,
    request: control_pb2.GetStepsRequest,
    device_work: DeviceWork = lambda _: None,
    collections: RecentCollections = lambda _: (),
) -> control_pb2.GetStepsResponse:
    """Return the newest training steps of the ranks that are asked for.

    Raises:
        NoSuchTargetError: There is no such run, or it lacks one of the ranks.
    """
    wanted = set(request.ranks)
    there = ranks_of(store, request.run, request.job)
    if not there:
        check_found(request.run, request.job)
    if missing := sorted(wanted - {rank.identity.rank for rank in there}):
        raise NoSuchTargetError(
            f"no rank {', '.join(map(str, missing))} on this node", "`torchperfd ps` lists those there are"
        )
    count = min(request.newest or HISTORY_STEPS, HISTORY_STEPS)
    chosen = [rank for rank in there if not wanted or rank.identity.rank in wanted]
    return control_pb2.GetStepsResponse(
        ranks=[_rank_steps(rank, count, device_work(rank), collections(rank)) for rank in chosen]
    )


def check_found(run: str, job: str) -> None:
    """Raise where a requested run or job is not on this node, instead of returning nothing.

    Raises:
        NoSuchTargetError: A run or job was requested.
    """
    asked = [f"{kind} {name[:80]}" for kind, name in (("run", run), ("job", job)) if name]
    if asked:
        raise NoSuchTargetError(
            f"no {' of '.join(asked)} on this node", "`torchperfd ps` lists those there are"
        )


def readings(
    families: Iterable[Family], request: control_pb2.GetReadingsRequest
) -> control_pb2.GetReadingsResponse:
    """Return the newest values of the metrics that are asked for."""
    names = set(request.names)
    return control_pb2.GetReadingsResponse(
        readings=[
            control_pb2.Reading(
                name=family.name, labels=dict(zip(family.labels, labels, strict=True)), value=value
            )
            for family in families
            if not names or family.name in names
            for labels, value in family.samples
        ]
    )


def _rank_steps(
    rank: Rank, count: int, on_device: RankWork | None, lately: Sequence[Pauses]
) -> control_pb2.RankSteps:
    steps = rank.history.newest(count)
    held = len(steps.duration_ns)
    return control_pb2.RankSteps(
        status=translate.rank_status(rank),
        first_step=max(0, rank.next_step - held),
        count=held,
        end_ns=_packed(steps.end_unix_ns),
        duration_ns=_packed(steps.duration_ns),
        phases=[
            session_pb2.PhaseColumn(phase=name, ns=_packed(column)) for name, column in steps.phases.items()
        ],
        gc=[session_pb2.GcAccount(calls=pauses.calls, ns=pauses.ns) for pauses in rank.totals.gc],
        recent_gc=[
            control_pb2.RecentCollections(per_step=each.per_step, seconds=each.seconds) for each in lately
        ],
        device_phases=translate.device_phases(on_device),
    )


def _packed(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
