"""This node's newest data as messages: steps, readings, and its part of a survey of all nodes.

At the end of a run, the daemons of the other nodes are asked once for the verdict on the whole job.
"""

import asyncio
import logging
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np

from torchperfd.v1 import control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.diagnosis.claims import unseen_words
from torchperfd_daemon.diagnosis.detect.straggler import MIN_STEPS, RankWork
from torchperfd_daemon.diagnosis.edits import Pauses
from torchperfd_daemon.diagnosis.verdict import Verdict
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.observer.mean_step import verdict_on_mean_step
from torchperfd_daemon.service import translate, translate_diagnosis
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.rank_process import LISTED
from torchperfd_daemon.service.targets import PeerDirectory
from torchperfd_daemon.store.model import HISTORY_STEPS
from torchperfd_daemon.store.store import Rank, Store

PublishedVerdict = Callable[[str], Verdict | None]
"""Returns the published verdict on a run; None before there is one."""

DeviceWork = Callable[[Rank], RankWork | None]
"""Returns a rank's newest steps on its device, in means of a second; None without device times."""

RecentCollections = Callable[[Rank], Sequence[Pauses]]
"""Returns a rank's garbage collections since its steps last changed; none where that is not known."""


def ranks_of(store: Store, run: str, job: str) -> list[Rank]:
    """Return the ranks of a run and of a job on this node; an empty name selects all."""
    store.forget_departed()
    return [
        rank
        for rank in store.ranks()
        if run in ("", rank.identity.run) and job in ("", rank.identity.job_name)
    ]


def survey(
    store: Store, held: PublishedVerdict, device_work: DeviceWork, request: fleet_pb2.NodeSurveyRequest
) -> fleet_pb2.NodeSurvey:
    """Return the survey of the requested ranks; it may be empty."""
    ranks = ranks_of(store, request.run, request.job)
    answer = fleet_pb2.NodeSurvey(ranks=[blocks(rank, request.newest, device_work(rank)) for rank in ranks])
    if request.verdicts:
        answer.verdicts.extend(verdicts(ranks, held))
    return answer


def verdicts(ranks: Sequence[Rank], held: PublishedVerdict) -> list[control_pb2.Verdict]:
    """Return the verdict on each run that the ranks are of, by name."""
    runs: dict[str, list[Rank]] = {}
    for rank in ranks:
        runs.setdefault(rank.identity.run, []).append(rank)
    return [
        translate_diagnosis.run_verdict_to_message(verdict_on(run, runs[run], held), runs[run])
        for run in sorted(runs)
    ]


def verdict_on(run: str, ranks: Sequence[Rank], held: PublishedVerdict) -> Verdict:
    """Return the published verdict on a run; before there is one, that on its mean step."""
    return held(run) or verdict_on_mean_step(run, ranks)


def blocks(rank: Rank, newest: int, on_device: RankWork | None = None) -> control_pb2.RankSteps:
    """Return a rank's newest steps as the means of at most two dozen blocks of equal length.

    The comparison of ranks (``find_stragglers``) takes means over as many blocks, so its result does not
    change; a rank with nine phases takes 1.4 KiB.

    Args:
        newest: How many steps; 0 for the present ones (``Rank.present_steps``).
    """
    steps = rank.history.newest(min(newest or HISTORY_STEPS, rank.steady_steps))
    held = len(steps.duration_ns) if newest else rank.present_steps
    length = max(1, held // MIN_STEPS)
    count = held if length == 1 else MIN_STEPS

    def means(column: Sequence[int]) -> bytes:
        newest_of_all = np.asarray(column, dtype=np.int64)[len(column) - count * length :]
        packed: bytes = newest_of_all.reshape(count, length).mean(axis=1).astype("<i8").tobytes()
        return packed

    ends = np.asarray(steps.end_unix_ns, dtype=np.int64)[len(steps.end_unix_ns) - count * length :]
    return control_pb2.RankSteps(
        status=translate.rank_status_to_message(rank),
        first_step=max(0, rank.next_step - count * length),
        count=count,
        end_ns=ends[length - 1 :: length].astype("<i8").tobytes(),
        duration_ns=means(steps.duration_ns),
        phases=[
            session_pb2.PhaseColumn(phase=name, ns=means(column)) for name, column in steps.phases.items()
        ],
        device_phases=translate.device_phases_to_messages(on_device),
        block_steps=length,
    )


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
        raise NoSuchTargetError(f"no rank {', '.join(map(str, missing))} on this node", LISTED)
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
        raise NoSuchTargetError(f"no {' of '.join(asked)} on this node", LISTED)


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
        status=translate.rank_status_to_message(rank),
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
        device_phases=translate.device_phases_to_messages(on_device),
    )


def _packed(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


log = logging.getLogger("torchperfd.control")

MAX_END_SECONDS: Final = 1.0
_MAX_NAMED: Final = 3

OwnSurvey = Callable[[fleet_pb2.NodeSurveyRequest], fleet_pb2.NodeSurvey]
"""Returns this node's part of a survey."""


class EndVerdicts:
    """Verdicts of all nodes on runs that end.

    The end of the run and its loggers ask at the same time, and a peer that was asked may be gone afterwards:
    all of them get the answer to one question.
    """

    def __init__(self, others: PeerDirectory, own: OwnSurvey) -> None:
        self._others = others
        self._own = own
        self._answers: dict[str, asyncio.Task[control_pb2.Verdict | None]] = {}

    async def of_job(
        self, run: str, seconds: float, rights: Rights, present: Collection[str]
    ) -> control_pb2.Verdict | None:
        """Return the verdict of all nodes on a run; None if no other node is known.

        Args:
            seconds: How long the other nodes may take.
            rights: Of the caller, who may command the run's processes; so all callers see the same.
            present: The runs that this daemon has; the answers on others are dropped.
        """
        self._answers = {name: each for name, each in self._answers.items() if name in present}
        known = self._answers.get(run)
        if known is None or (known.done() and _is_worth_asking_again(known)):
            known = asyncio.create_task(self._ask(run, min(seconds, MAX_END_SECONDS), rights))
            self._answers[run] = known
        return await asyncio.shield(known)

    async def _ask(self, run: str, seconds: float, rights: Rights) -> control_pb2.Verdict | None:
        asked = fleet_pb2.NodeSurveyRequest(run=run, verdicts=True, at_end=True)
        try:
            response = await self._others.diagnose(
                asked, self._own(asked), rights.redact_verdict, rights.may_command, seconds
            )
        except TorchperfdError as error:
            log.debug("run %s ends, and no other node is asked: %s", run, error)
            return None
        found = next((each for each in response.verdicts if each.run == run), None)
        if found is not None and found.unseen_ranks and response.unreachable:
            named = ", ".join(f"{peer.address} ({peer.reason})" for peer in response.unreachable[:_MAX_NAMED])
            words = f"; no answer from {named}"
            found.evidence += words
            found.summary += words
        return found


def note_unseen(verdict: control_pb2.Verdict, ranks: Sequence[Rank]) -> None:
    """Add to a verdict on this node's part of a job that the job has other ranks, unless it says so."""
    world = max(rank.identity.world_size for rank in ranks)
    verdict.unseen_ranks = world - len(ranks)
    words = unseen_words(verdict.unseen_ranks, world)
    if words not in verdict.evidence:
        verdict.evidence += f"; {words}"
        verdict.summary += f"; {words}"


def _is_worth_asking_again(answer: "asyncio.Task[control_pb2.Verdict | None]") -> bool:
    if answer.cancelled() or answer.exception() is not None:
        return True
    verdict = answer.result()
    return verdict is None or verdict.unseen_ranks > 0
