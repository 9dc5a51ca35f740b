"""The verdict at the end of a part of a job: all nodes are asked, once, and what was not seen is said."""

import asyncio
from typing import Any, cast

import pytest
from tests.support.values import some

from torchperfd.v1 import control_pb2, fleet_pb2
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.server.lifecycle import Lifetime
from torchperfd_daemon.service.node_survey import EndVerdicts, note_unseen
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.targets import PeerDirectory
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank

RIGHTS = cast("Any", type("All", (), {"redact_verdict": None, "may_command": None}))()
SLOW = control_pb2.Verdict(cause="slow rank", run="both", rank=3, evidence="late", summary="slow rank · late")
UNSEEN = control_pb2.Verdict(cause="unknown", run="both", evidence="2 are gone", unseen_ranks=2)


class Peers:
    """Other nodes that give these answers, one after the other."""

    def __init__(self, *answers: control_pb2.DiagnoseResponse | UsageError) -> None:
        self.answers = [*answers]
        self.asked: list[tuple[fleet_pb2.NodeSurveyRequest, float]] = []

    async def diagnose(
        self, asked: fleet_pb2.NodeSurveyRequest, own: Any, redact: Any, may: Any, seconds: float
    ) -> control_pb2.DiagnoseResponse:
        self.asked.append((asked, seconds))
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, UsageError):
            raise answer
        return answer


def answer(verdict: control_pb2.Verdict, *unreachable: str) -> control_pb2.DiagnoseResponse:
    gone = [control_pb2.UnreachablePeer(address=each, reason="connection refused") for each in unreachable]
    return control_pb2.DiagnoseResponse(verdicts=[verdict], unreachable=gone)


def ask(peers: Peers, times: int = 1) -> list[control_pb2.Verdict | None]:
    """Return what several callers get that ask at once."""

    async def all_at_once() -> list[control_pb2.Verdict | None]:
        verdicts = EndVerdicts(cast("PeerDirectory", peers), lambda _: fleet_pb2.NodeSurvey())
        return await asyncio.gather(
            *(verdicts.of_job("both", 0.3, cast("Rights", RIGHTS), {"both"}) for _ in range(times))
        )

    return asyncio.run(all_at_once())


def test_end_verdict_of_all_nodes_is_asked_for_once() -> None:
    peers = Peers(answer(SLOW))
    assert ask(peers, 3) == [SLOW] * 3
    [(asked, seconds)] = peers.asked
    assert (asked.run, asked.at_end, asked.verdicts, seconds) == ("both", True, True, 0.3)


def test_end_verdict_names_the_peers_without_an_answer() -> None:
    [verdict] = ask(Peers(answer(UNSEEN, "10.0.0.2:9408")))
    assert some(verdict).evidence == "2 are gone; no answer from 10.0.0.2:9408 (connection refused)"
    [whole] = ask(Peers(answer(SLOW, "10.0.0.2:9408")))
    assert whole == SLOW


def test_end_verdict_without_peers_is_that_of_this_node() -> None:
    assert ask(Peers(UsageError("no peers", "name them"))) == [None]


def ranks(*numbers: int, world: int = 4) -> list[Rank]:
    return [Rank(RankIdentity("both", number, world), 0.0) for number in numbers]


def test_verdict_on_a_part_of_a_job_says_so_once() -> None:
    verdict = control_pb2.Verdict()
    verdict.CopyFrom(SLOW)
    note_unseen(verdict, ranks(0, 1))
    assert verdict.evidence == "late; 2 of the job's 4 ranks are not seen by this daemon"
    assert verdict.unseen_ranks == 2
    note_unseen(verdict, ranks(0, 1))
    assert verdict.evidence.count("not seen") == 1


@pytest.mark.parametrize("was_asked", [True, False])
async def test_lifetime_waits_for_the_last_question(monkeypatch: pytest.MonkeyPatch, was_asked: bool) -> None:
    """A daemon whose owner and ranks have left answers the node on which the job's first rank ends."""
    monkeypatch.setattr("torchperfd_daemon.server.lifecycle.LAST_QUESTION_S", 0.01)

    async def owner_gone() -> None:
        return

    monkeypatch.setattr("torchperfd_daemon.server.lifecycle._owner_gone", owner_gone)
    lifetime, seen = Lifetime(embedded=True), []

    def awaits() -> bool:
        seen.append("waits")
        if was_asked:
            lifetime.was_asked()
        return True

    await asyncio.wait_for(lifetime.wait(lambda: 0, awaits), 5)
    assert seen == ["waits"]
