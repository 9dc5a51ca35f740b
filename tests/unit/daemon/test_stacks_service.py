"""Gathering the stacks of ranks, over the wire and for the command."""

import asyncio
import json

import grpc
import pytest
from tests.support.commands import Run
from tests.support.served import RankStream, Served, control, with_daemon
from tests.unit.daemon.processes import HERE

from torchperfd.model.process import GroupProgress
from torchperfd.v1 import contract, control_pb2, session_pb2
from torchperfd_daemon.collectors.process import RankProcess
from torchperfd_daemon.service import translate_diagnosis
from torchperfd_daemon.service.rank_process import UnreachableError
from torchperfd_daemon.service.rank_session import Session
from torchperfd_daemon.service.stack_requests import Report, StackRequests
from torchperfd_daemon.stacks.model import Frame, Outcome, RankStacks, Thread
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank

FORWARD = Thread(1, "MainThread", True, False, (Frame("/job/train.py", 41, "forward"),))
PROGRESS = GroupProgress("0", "default_pg", 9, 9, "all_reduce", "4")


class Outside:
    """Reads processes from outside, or sends signals, as a test says."""

    def __init__(self, reason: str = "") -> None:
        self.reason, self.processes = reason, list[RankProcess]()

    async def __call__(self, process: RankProcess, seconds: float) -> tuple[Thread, ...]:
        self.processes.append(process)
        if self.reason:
            raise UnreachableError(self.reason)
        return (FORWARD,)


class Rankling:
    """A connected rank that gives a prepared answer."""

    def __init__(self, requests: StackRequests, answers: bool = True) -> None:
        self.requests, self.answers, self.asked = requests, answers, 0

    reports_stacks = True
    reports_collectives = True

    def dump_stacks(self, request_id: int, **_: bool) -> None:
        self.asked += 1
        if self.answers:
            self.requests.on_report(self, request_id, Report((FORWARD,), "forward", 118))

    def tell_collectives(self, request_id: int) -> None:
        self.asked += 1
        self.requests.on_collectives(self, request_id, (PROGRESS,))


def gather(
    requests: StackRequests,
    *targets: tuple[Rank, Rankling | None],
    seconds: float = 5.0,
    allow_signal: bool = False,
) -> list[RankStacks]:
    async def run() -> list[RankStacks]:
        found = requests.stacks(targets, seconds, allow_signal=allow_signal)
        return [reported async for reported in found]

    return sorted(asyncio.run(run()), key=lambda reported: reported.rank)


def record(rank: int, namespace: int = 0) -> Rank:
    return Rank(
        RankIdentity(
            *("bert-17", rank),
            world_size=4,
            node="node-a",
            pid=4000 + rank,
            pid_namespace=namespace,
            process_start_ticks=1,
        ),
        0.0,
    )


def test_each_rank_is_reported_with_its_state() -> None:
    requests = StackRequests(wall=lambda: 1010.0)
    well, silent, gone = record(0), record(1), record(2, HERE)
    well.last_step_unix_seconds = 1000.0
    reported = gather(
        requests,
        (well, Rankling(requests)),
        (silent, Rankling(requests, answers=False)),
        (gone, None),
        seconds=0.2,
    )
    assert [one.outcome for one in reported] == [Outcome.ANSWERED, Outcome.NO_ANSWER, Outcome.GONE]
    assert (reported[0].threads, reported[0].phase, reported[0].step) == ((FORWARD,), "forward", 118)
    assert (reported[0].seconds_since_step, reported[1].seconds_since_step) == (10.0, None)
    assert reported[1].reason == (
        "no Python thread of it answers; it runs in a pid namespace of its own, where the daemon"
        " cannot reach it;"
        " `torchperfd stacks --signal` may read it, at the risk that its --help states"
    )
    assert reported[2].reason == "the process has ended"


HELD = "no Python thread of it answers, as when native code holds the interpreter"


def test_stacks_of_a_held_rank_are_read_from_outside() -> None:
    read, signal = Outside(), Outside()
    requests = StackRequests(read=read, signal=signal)
    held, lost = record(0), record(1)
    reported = gather(
        requests, (held, Rankling(requests, answers=False)), (lost, None), seconds=0.2, allow_signal=True
    )
    assert [one.outcome for one in reported] == [Outcome.READ, Outcome.READ]
    assert [one.reason for one in reported] == [HELD, "it has lost its connection to the daemon"]
    assert [one.threads for one in reported] == [(FORWARD,), (FORWARD,)]
    assert signal.processes == []


def test_stacks_without_py_spy_send_no_signal_unasked() -> None:
    signal = Outside()
    requests = StackRequests(read=Outside("py-spy is not installed"), signal=signal)
    (reported,) = gather(requests, (record(0), None))
    assert (reported.outcome, reported.threads) == (Outcome.NO_ANSWER, ())
    assert reported.reason == (
        "it has lost its connection to the daemon; py-spy is not installed;"
        " `torchperfd stacks --signal` may read it, at the risk that its --help states"
    )
    assert signal.processes == []


def test_stacks_with_signal_allowed_state_the_risk() -> None:
    signal = Outside()
    requests = StackRequests(read=Outside("py-spy is not installed"), signal=signal)
    (reported,) = gather(
        requests, (record(0), Rankling(requests, answers=False)), seconds=0.2, allow_signal=True
    )
    assert (reported.outcome, reported.threads) == (Outcome.SIGNALLED, (FORWARD,))
    assert reported.reason == f"{HELD}; a signal was sent, which can crash a rank"
    assert len(signal.processes) == 1


def test_stacks_with_no_way_left_name_each_reason() -> None:
    requests = StackRequests(read=Outside("no py-spy"), signal=Outside("Python runs in it"))
    (reported,) = gather(requests, (record(0), None), allow_signal=True)
    assert reported.reason == "it has lost its connection to the daemon; no py-spy; Python runs in it"


def test_only_a_stalled_rank_is_asked_for_its_collectives() -> None:
    requests = StackRequests(wall=lambda: 1010.0)
    still, well, older = record(0), record(1), record(2)
    still.last_step_unix_seconds = older.last_step_unix_seconds = 1000.0
    well.last_step_unix_seconds = 1009.9
    asked = [Rankling(requests) for _ in range(3)]
    asked[2].reports_collectives = False
    reported = gather(requests, *zip((still, well, older), asked, strict=True))
    assert [one.collectives for one in reported] == [(PROGRESS,), (), ()]
    assert [one.asked for one in asked] == [2, 1, 1]


def test_a_record_that_is_stuck_costs_the_stacks_nothing() -> None:
    class Stuck(Rankling):
        def tell_collectives(self, request_id: int) -> None:
            self.asked += 1

    requests = StackRequests()
    stuck = Stuck(requests)
    (reported,) = gather(requests, (record(0), stuck), seconds=0.2)
    assert (reported.outcome, reported.threads, reported.collectives) == (Outcome.ANSWERED, (FORWARD,), ())
    assert stuck.asked == 2


def test_a_rank_cannot_answer_for_another_nor_twice_nor_late() -> None:
    requests = StackRequests()
    liar = Rankling(requests, answers=False)

    class Victim(Rankling):
        def dump_stacks(self, request_id: int, **_: bool) -> None:
            requests.on_report(liar, request_id, Report((), "lied", 0))
            super().dump_stacks(request_id)
            requests.on_report(self, request_id, Report((), "again", 0))

    (reported,) = gather(requests, (record(0), Victim(requests)))
    requests.on_report(liar, 1, Report((), "late", 0))
    assert reported.phase == "forward"


def test_loading_stacks_come_from_the_rank_itself_or_not_at_all() -> None:
    def loading_stacks(answers: bool) -> tuple[Thread, ...] | None:
        requests = StackRequests(read=Outside("never asked"))
        rank = Rankling(requests, answers)
        return asyncio.run(requests.sample(rank, 60 if answers else 0.01))

    assert loading_stacks(answers=True) == (FORWARD,)
    assert loading_stacks(answers=False) is None


def test_thread_stacks_come_from_the_rank_itself() -> None:
    requests = StackRequests(read=Outside("never asked"))
    assert asyncio.run(requests.sample(Rankling(requests), 60, threads_only=True)) == (FORWARD,)


@with_daemon
async def test_rank_is_asked_over_grpc_and_its_answer_returned(
    served: Served, channel: grpc.aio.Channel
) -> None:
    rank = RankStream(channel)
    await rank.say(
        session_pb2.ClientMessage(
            hello=session_pb2.Hello(
                api=session_pb2.ApiRange(min=1, max=1),
                features=[contract.STACKS, contract.COLLECTIVES],
                identity=session_pb2.RankIdentity(run="bert-17", rank=3, world_size=4, pid=70),
            )
        )
    )
    assert (await rank.receive()).HasField("welcome")
    call = control(channel).Stacks(control_pb2.StacksRequest(timeout_seconds=5))
    order = (await rank.receive()).dump_stacks
    thread = session_pb2.ThreadStack(ident=5, name="Main\x1b[2J", training=True)
    thread.frames.add(file="/job/train.py", line=41, function="forward")
    report = session_pb2.StackReport(
        request_id=order.request_id, threads=[thread], phase="forward", step=2**64 - 1
    )
    await rank.say(session_pb2.ClientMessage(stack_report=report))
    counted = session_pb2.CollectiveReport(request_id=(await rank.receive()).tell_collectives.request_id)
    counted.groups.add(name="0", description="a\x1b[2J", begun=9, number=9, call="all_reduce", sizes="4")
    await rank.say(session_pb2.ClientMessage(collective_report=counted))
    reported = translate_diagnosis.rank_stacks_from_message(await call.read())
    assert await call.code() is grpc.StatusCode.OK
    assert (reported.rank, reported.world_size, reported.pid) == (3, 4, 70)
    assert (reported.outcome, reported.phase, reported.step) == (Outcome.ANSWERED, "forward", 2**62)
    assert reported.collectives == (GroupProgress("0", "a?[2J", 9, 9, "all_reduce", "4"),)
    assert reported.threads == (Thread(5, "Main?[2J", True, False, (Frame("/job/train.py", 41, "forward"),)),)
    await rank.leave()


@with_daemon
async def test_an_older_client_is_not_asked_what_it_does_not_know(
    served: Served, channel: grpc.aio.Channel
) -> None:
    rank = RankStream(channel)
    await rank.join(rank=1)
    message = await control(channel).Stacks(control_pb2.StacksRequest(timeout_seconds=5)).read()
    assert message.outcome == control_pb2.STACK_OUTCOME_NO_ANSWER
    assert message.reason.startswith("its torchperfd is too old to report stacks")
    await rank.leave()


class Answering(Session):
    """A rank that answers the daemon itself."""

    def __init__(self, rank: Rank, requests: StackRequests) -> None:
        super().__init__(rank, [contract.STACKS])
        self._requests = requests

    def dump_stacks(self, request_id: int, **_: bool) -> None:
        self._requests.on_report(self, request_id, Report((FORWARD,), "forward", 118))


def join(served: Served, rank: int, run: str = "bert-17", world_size: int = 2) -> Rank:
    joined = served.store.join(RankIdentity(run, rank, world_size, node="node-a", pid=4000 + rank))
    served.sessions.add(Answering(joined, served.sessions.stacks))
    return joined


def test_command_reports_all_ranks_or_the_chosen_ones(served: Served, command: Run) -> None:
    join(served, 0)
    join(served, 1)
    assert command("stacks") == (
        0,
        "run bert-17: 2 ranks, no training step so far\n"
        "ranks 0-1 are at train.py:41 in forward\n\n"
        "ranks 0-1 are at train.py:41 in forward, step 118, phase forward\n"
        "  forward  /job/train.py:41\n",
        "",
    )
    code, out, err = command("stacks", "--json", "--ranks", "1", "--run", "bert-17")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["finding"], document["absent"]) == ("rank 1 is at train.py:41 in forward", [])
    assert [rank["rank"] for rank in document["ranks"]] == [1]


def test_ranks_that_are_not_here_make_it_partial(served: Served, command: Run) -> None:
    join(served, 1, world_size=4)
    code, out, err = command("stacks")
    assert code == 5
    assert "rank 1 is at train.py:41 in forward" in out
    assert err == "torchperfd: ranks 0,2-3 are not here: on other nodes, or gone for a minute\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--run", "absent"), 3, "no run absent on this node; `torchperfd ps` lists those there are"),
        (("--run", "bert-17", "--ranks", "0,7"), 3, "run bert-17 has no rank 7 on this node; it has 0"),
        ((), 3, "this node has 2 runs: bert-17, other; choose one with --run"),
        (("--ranks", "x"), 2, "'x' is no rank or range of ranks"),
        (("--timeout", "nan"), 2, "is not a time in seconds"),
    ],
)
def test_what_is_not_there_is_one_line_with_the_remedy(
    served: Served, command: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    join(served, 0)
    join(served, 0, run="other")
    got, out, err = command("stacks", *arguments)
    assert (got, out) == (code, "")
    assert words in err


def test_signal_over_the_fleet_is_refused(served: Served, command: Run) -> None:
    join(served, 0)
    assert command("stacks", "--signal", "--fleet") == (
        2,
        "",
        "torchperfd: signals are sent on this node only; leave --fleet or --signal out\n",
    )


def test_without_any_run_it_says_how_to_start_one(served: Served, command: Run) -> None:
    assert command("stacks") == (3, "", "torchperfd: this node has no run; start one with `torchperfd run`\n")
