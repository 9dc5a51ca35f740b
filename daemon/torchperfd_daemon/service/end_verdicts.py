"""The verdict on a whole job at the end of a run, for which the daemons of other nodes are asked once."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.diagnosis.claims import unseen_words
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.service.peer_directory import PeerDirectory
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.store import Rank

log = logging.getLogger("torchperfd.control")

MAX_SECONDS: Final = 1.0
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
            known = asyncio.create_task(self._ask(run, min(seconds, MAX_SECONDS), rights))
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
    """Add to a verdict on this node's part of a job that the job has other ranks, unless it says so.

    Args:
        ranks: Those of this node.
    """
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
