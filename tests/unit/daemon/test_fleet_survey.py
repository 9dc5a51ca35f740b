"""Steps and verdicts of all nodes: blocks of steps, each rank once, and what peers say is not trusted."""

import contextlib
import math
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.node import free_port
from tests.unit.daemon.fleet_nodes import PlayedSessions, asking, may_all
from tests.unit.daemon.live_runs import STEPS, train

from torchperfd.model.verdict_document import verdict_to_document
from torchperfd.v1 import control_pb2, fleet_pb2, session_pb2
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.diagnosis.detect.straggler import find_stragglers
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.errors import NoSuchTargetError
from torchperfd_daemon.fleet import translate as fleet_translate
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import Credentials
from torchperfd_daemon.fleet.service import FleetService
from torchperfd_daemon.fleet.translate import shown_verdicts
from torchperfd_daemon.fleet.transport import AuthInterceptor, PeerError, listen
from torchperfd_daemon.metrics.health import CallCounts
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.service import node_survey
from torchperfd_daemon.service.permissions import Rights
from torchperfd_daemon.service.session import SessionService
from torchperfd_daemon.service.translate_work import rank_work_from_message
from torchperfd_daemon.store.model import HISTORY_STEPS, RankIdentity, StepColumns
from torchperfd_daemon.store.store import Store

RUN = "bert-17"
ADA, BOB = 61_001, 61_002


def store_of(*ranks: int, case: str = "one straggler") -> Store:
    """Return what a node knows that has some of the run's ranks."""
    store = Store()
    train(store, case)
    for record in list(store.ranks()):
        if record.identity.rank not in ranks:
            store.forget(record)
    return store


@dataclass
class SurveyedNode:
    """A node whose fleet service answers."""

    address: Address
    store: Store


class Lying(FleetService):
    """A node whose columns are of different lengths."""

    async def Survey(  # noqa: N802
        self, request: fleet_pb2.NodeSurveyRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> fleet_pb2.NodeSurvey:
        """Answer more than there is."""
        reported = await super().Survey(request, context)
        reported.ranks[0].phases[0].ns += bytes(8)
        return reported


@contextlib.asynccontextmanager
async def node(
    directory: Path,
    name: str,
    store: Store,
    verdict: Callable[[str], Verdict | None] = lambda _: None,
    service: type[FleetService] = FleetService,
) -> AsyncIterator[SurveyedNode]:
    """Serve a node for as long as the block lasts."""
    catalog = Catalog(directory / name)
    sessions = cast("SessionService", PlayedSessions([]))
    answers = service(store, sessions, Coordinator(catalog), catalog, f"i-{name}", name, verdict)
    interceptor = AuthInterceptor(Credentials)
    server, address = await listen(Address("127.0.0.1", 0), interceptor, answers, CallCounts())
    try:
        yield SurveyedNode(address, store)
    finally:
        await server.stop(None)


def ask(**fields: object) -> tuple[fleet_pb2.NodeSurveyRequest, fleet_pb2.NodeSurvey]:
    """Return a question, and the answer of an asking daemon that has no ranks."""
    return fleet_pb2.NodeSurveyRequest(**fields), fleet_pb2.NodeSurvey()  # type: ignore[arg-type]


def show_all(verdict: control_pb2.Verdict, uids: object) -> None:
    """Remove nothing."""


async def test_ranks_of_all_nodes_are_one_list(tmp_path: Path) -> None:
    dead = Address("127.0.0.1", free_port())
    async with (
        node(tmp_path, "a", store_of(0, 2)) as one,
        node(tmp_path, "b", store_of(1, 3)) as two,
        # A node may be known by two names.
        asking(tmp_path, [one.address, dead, two.address, Address("localhost", one.address.port)]) as (
            view,
            _,
        ),
    ):
        reported = await view.steps(*ask(newest=64), may_all)
        assert [each.status.identity.rank for each in reported.ranks] == [0, 1, 2, 3]
        assert [(each.node, each.ranks) for each in reported.nodes] == [("asking", 0), ("a", 2), ("b", 2)]
        assert [peer.address for peer in reported.unreachable] == [str(dead)]
        [slow] = find_stragglers([rank_work_from_message(each) for each in reported.ranks])
        assert (slow.rank, slow.phase) == (2, "forward")


async def test_one_verdict_is_on_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    def blames_a_victim(run: str) -> Verdict:
        return Verdict(Cause.SLOW_RANK, run, "a", 1, "other", "wrong", 0.02, "rm -rf /")

    async with (
        node(tmp_path, "a", store_of(0, 1), blames_a_victim) as one,
        node(tmp_path, "b", store_of(2, 3)) as two,
        asking(tmp_path, [one.address, two.address]) as (view, _),
    ):
        reported = await view.diagnose(*ask(verdicts=True), show_all, may_all)
        [verdict] = reported.verdicts
        assert (verdict.run, verdict.cause, verdict.rank, verdict.node) == (RUN, "slow rank", 2, "b")
        assert verdict.cost_seconds_per_step == pytest.approx(0.02, rel=0.05)
        assert not reported.unreachable


async def test_ranks_of_a_node_that_is_gone_are_not_called_healthy(tmp_path: Path) -> None:
    dead = Address("127.0.0.1", free_port())
    async with node(tmp_path, "a", store_of(0, 1)) as one, asking(tmp_path, [one.address, dead]) as (view, _):
        [verdict] = (await view.diagnose(*ask(verdicts=True), show_all, may_all)).verdicts
        assert verdict.cause == "unknown"
        assert "2 of the job's 4 ranks are on no node that answers" in verdict.evidence


async def test_a_run_and_a_job_are_looked_for_everywhere(tmp_path: Path) -> None:
    dead = Address("127.0.0.1", free_port())
    other = store_of(1)
    other.join(RankIdentity("other", 0, 1, job_name="gpt"))
    async with (
        node(tmp_path, "a", store_of(0)) as one,
        node(tmp_path, "b", other) as two,
        asking(tmp_path, [one.address, two.address, dead]) as (view, _),
    ):
        for field, name, found in (("job", "bert", [0, 1]), ("run", "other", [0]), ("job", "gpt", [0])):
            reported = await view.steps(*ask(**{field: name}), may_all)
            assert [each.status.identity.rank for each in reported.ranks] == found
        assert [each.run for each in (await view.runs([], may_all, "gpt")).runs] == ["other"]
        for question in (
            view.steps(*ask(run="gone"), may_all),
            view.diagnose(*ask(job="gone", verdicts=True), show_all, may_all),
            view.runs([], may_all, "gone"),
        ):
            with pytest.raises(NoSuchTargetError, match=f"gone on any node.*no answer from {dead}"):
                await question


async def test_moved_rank_is_listed_once(tmp_path: Path) -> None:
    left = store_of(0, 1)
    for record in left.ranks():
        if record.identity.rank == 1:
            left.leave(record)
    async with (
        node(tmp_path, "old", left, lambda run: Verdict(Cause.NONE, run, "", None, "", "", 0.0, "")) as one,
        node(tmp_path, "new", store_of(1)) as two,
        asking(tmp_path, [two.address, one.address]) as (view, _),
    ):
        reported = await view.steps(*ask(), may_all)
        assert [(each.status.identity.rank, each.status.connected) for each in reported.ranks] == [
            (0, True),
            (1, True),
        ]


async def test_node_with_an_invalid_answer_is_named(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "a", store_of(0), service=Lying) as one,
        node(tmp_path, "b", store_of(1)) as two,
        asking(tmp_path, [one.address, two.address]) as (view, _),
    ):
        reported = await view.steps(*ask(), may_all)
        assert [each.status.identity.rank for each in reported.ranks] == [1]
        [peer] = reported.unreachable
        assert (peer.address, peer.reason) == (str(one.address), "its steps cannot be read")


def starved_ranks(*uids: int | None) -> list[fleet_pb2.NodeSurvey]:
    """Return the surveys of nodes that each have a rank of the run, which waits for its data."""

    def starved(run: str) -> Verdict:
        return Verdict(Cause.INPUT_BOUND, run, "", None, "data", "words", 0.02, "")

    surveys = []
    for rank, uid in enumerate(uids):
        store = Store()
        store.join(RankIdentity(RUN, rank, len(uids), script="my job.py"), uid)
        request = fleet_pb2.NodeSurveyRequest(verdicts=True)
        surveys.append(node_survey.survey(store, starved, lambda _: None, request))
    return surveys


@pytest.mark.parametrize(
    ("owners", "caller", "name"),
    [
        ((ADA, ADA), ADA, "'my job.py'"),
        ((ADA, ADA), BOB, "SCRIPT"),
        ((ADA, BOB), ADA, "SCRIPT"),
        ((ADA, None), ADA, "SCRIPT"),
    ],
)
def test_fleet_verdict_names_the_script_to_its_user(
    owners: tuple[int | None, ...], caller: int, name: str
) -> None:
    surveys = starved_ranks(*owners)
    for each in surveys:
        # A node names it in its verdicts, too; the ranks' own name counts.
        each.verdicts[0].script = "rm"
    [verdict] = shown_verdicts(surveys, Rights(Caller(caller), is_admin=False).redact_verdict)
    assert verdict_to_document(verdict)["fix"].startswith(f"`torchperfd tune {name}` tries settings")
    assert ("my job.py" in str(verdict)) == (name != "SCRIPT")


numbers = st.floats() | st.just(math.nan)


@given(st.text(max_size=300), numbers, st.integers(0, 9), st.integers(0, 300), st.integers(0, 5000))
def test_what_a_peer_says_cannot_drive_a_terminal_or_a_sum(
    text: str, number: float, state: int, count: int, block: int
) -> None:
    status = control_pb2.RankStatus(
        identity=session_pb2.RankIdentity(run=text, node=text, job_name=text),
        state=state,  # type: ignore[arg-type] # what no version of ours sends
        step_seconds=number,
        last_step_unix_seconds=number,
        phase_seconds={"data": number},
    )
    column = bytes(8 * count)
    steps = control_pb2.RankSteps(
        status=status,
        count=count,
        block_steps=block,
        end_ns=column,
        duration_ns=column,
        phases=[session_pb2.PhaseColumn(phase=text, ns=column)] * 70,
    )
    reported = fleet_pb2.NodeSurvey(node=text, ranks=[steps])
    if count > HISTORY_STEPS:
        with pytest.raises(PeerError):
            fleet_translate.tidy_survey(reported)
        return
    [tidied] = fleet_translate.tidy_survey(reported).ranks
    words = [reported.node, tidied.status.identity.run, *(phase.phase for phase in tidied.phases)]
    assert all(word.isprintable() and len(word) <= 200 for word in words)
    assert len(tidied.phases) == 64
    assert tidied.block_steps <= HISTORY_STEPS
    assert session_pb2.RunState.Name(tidied.status.state)
    own = tidied.status
    assert all(map(math.isfinite, [own.step_seconds, own.last_step_unix_seconds, own.phase_seconds["data"]]))
    message = control_pb2.Verdict(cause=text, run=text, rank=-1, cost_seconds_per_step=number)
    verdict = fleet_translate.verdict_from_message(message)
    assert 0 <= verdict.cost_seconds_per_step < math.inf
    assert verdict.summary.isprintable()


@given(st.lists(st.integers(1, 10**10), min_size=0, max_size=60), st.integers(0, 70))
def test_blocks_are_the_means_of_the_newest_steps(durations: list[int], newest: int) -> None:
    store = Store()
    rank = store.join(RankIdentity(RUN, 0))
    ends = [10**18 + sum(durations[: place + 1]) for place in range(len(durations))]
    columns = array("q", durations)
    store.add_steps(rank, StepColumns(array("q", ends), columns, {"data": columns}))
    reported = node_survey.blocks(rank, newest)
    if newest:
        wanted = len(durations[-newest:])
    else:
        recent = [end for end in ends if end >= ends[-1] - 10 * 10**9]
        wanted = min(len(ends), max(len(recent), 12))
    length = max(1, wanted // 12)
    count = wanted if length == 1 else 12
    kept = durations[len(durations) - count * length :]
    assert (reported.count, reported.block_steps) == (count, length)
    expected = [fmean(kept[place : place + length]) for place in range(0, count * length, length)]
    for blob in (reported.duration_ns, *(phase.ns for phase in reported.phases)):
        assert np.frombuffer(blob, "<i8").tolist() == pytest.approx(expected, abs=1)
    assert (
        np.frombuffer(reported.end_ns, "<i8").tolist()
        == ends[len(ends) - count * length :][length - 1 :: length]
    )
    fleet_translate.tidy_survey(fleet_pb2.NodeSurvey(ranks=[reported]))


def test_blocks_single_out_the_same_rank_as_all_steps() -> None:
    store = store_of(0, 1, 2, 3)
    assert STEPS % 12, "there are steps that no block has"
    whole = node_survey.newest_steps(store, control_pb2.GetStepsRequest()).ranks
    parts = [node_survey.blocks(rank, STEPS) for rank in store.ranks()]
    [slow], [again] = (
        find_stragglers(list(map(rank_work_from_message, reported))) for reported in (whole, parts)
    )
    assert (again.rank, again.phase) == (slow.rank, slow.phase) == (2, "forward")
    assert again.excess_seconds == pytest.approx(slow.excess_seconds, rel=0.01)
