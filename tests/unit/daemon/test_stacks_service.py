"""Asking ranks for their stacks: over the session, by a signal only where that is expected and safe."""

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.served import RankStream, Served, control, play, serving_from_a_thread

from torchperfd.v1 import contract, control_pb2, session_pb2
from torchperfd_daemon import cli
from torchperfd_daemon.collectors.ranks import RankProcess, own_namespace
from torchperfd_daemon.service import translate_stacks
from torchperfd_daemon.service.session import Session
from torchperfd_daemon.service.stack_desk import Report, StackDesk
from torchperfd_daemon.service.stack_signal import (
    GoneError,
    StoppedError,
    UnreachableError,
    look,
    stacks_by_signal,
    waits_in,
)
from torchperfd_daemon.stacks import Frame, GroupProgress, Outcome, RankStacks, Thread
from torchperfd_daemon.store import Rank, RankIdentity

SIGNAL = signal.SIGRTMIN + 7
HERE = own_namespace(Path("/proc"))
FORWARD = Thread(1, "MainThread", True, False, (Frame("/job/train.py", 41, "forward"),))


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def process(pid: int, ticks: int | None = None, namespace: int = HERE) -> RankProcess:
    return RankProcess("bert-17", 0, pid, namespace, start_ticks(pid) if ticks is None else ticks)


def by_signal(pid: int, seconds: float = 5.0, **more: int) -> tuple[Thread, ...]:
    return asyncio.run(stacks_by_signal(process(pid, **more), seconds))


def reason(pid: int, **more: Any) -> str:
    with pytest.raises(UnreachableError) as caught:
        by_signal(pid, **more)
    return str(caught.value)


@pytest.fixture
def file() -> Iterator[int]:
    """A file for stacks of this very process."""
    file = os.memfd_create(contract.STACKS_FILE)
    yield file
    os.close(file)


@pytest.fixture
def handler(file: int) -> Iterator[int]:
    """A handler of the signal that writes stacks into the file, as the client registers it."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    yield SIGNAL
    faulthandler.unregister(SIGNAL)


def invite(file: int, **changes: object) -> None:
    """Write the first line as the client does, or with changes."""
    line = {
        "signal": int(SIGNAL),
        "thread": threading.get_native_id(),
        "training": threading.get_ident(),
        "package": "/nowhere/",
        **changes,
    }
    os.write(file, json.dumps(line).encode() + b"\n")


READY = """
import ctypes, faulthandler, fcntl, json, os, sys, threading, time
number, what = int(sys.argv[1]), sys.argv[2]
def pump():
    while True:
        time.sleep(0.25)
def hang():
    if what == "interpreter held":
        ctypes.PyDLL(None).usleep(600_000_000)
    while True:
        if what == "interpreter held, now and then":
            ctypes.PyDLL(None).usleep(100_000)
        elif what == "asleep":
            time.sleep(600)
thread = threading.Thread(target=pump, daemon=True)
thread.start()
file = os.memfd_create("torchperfd-stacks")
if what == "handler that never returns":
    libc = ctypes.CDLL(None)
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    what = "interpreter held"
else:
    faulthandler.register(number, file=file, all_threads=True)
told = {"signal": number, "thread": thread.native_id, "training": threading.get_ident(), "package": ""}
os.write(file, json.dumps(told).encode() + b"\\n")
fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
print(flush=True)
hang()
"""


@contextlib.contextmanager
def ready(what: str) -> Iterator[int]:
    """Run a process that is ready for the signal, doing one thing; yield its id."""
    with subprocess.Popen(
        [sys.executable, "-c", READY, f"{SIGNAL:d}", what], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            yield child.pid
            assert child.poll() is None, f"it ended with {child.returncode}"
        finally:
            child.kill()


def test_a_process_in_which_no_python_can_run_writes_the_stacks_of_all_its_threads() -> None:
    with ready("interpreter held") as pid:
        for _ in range(3):
            training, pump = sorted(by_signal(pid), key=lambda thread: not thread.training)
            assert [frame.function for frame in training.frames] == ["hang", "<module>"]
            assert pump.frames[0].function == "pump"
            assert not pump.training


@pytest.mark.parametrize("what", ["asleep", "busy in Python"])
def test_a_process_in_which_python_runs_or_may_run_is_not_sent_a_signal(what: str) -> None:
    with ready(what) as pid:
        assert reason(pid, seconds=0.6) == (
            "Python runs in it, or may run, and asking it by a signal is not safe"
        )


def test_a_handler_that_does_not_return_costs_the_time_given_and_no_more() -> None:
    with ready("handler that never returns") as pid:
        assert reason(pid, seconds=1) == "it does not take signals"
        assert reason(pid, seconds=1) == f"it blocks signal {SIGNAL:d}"
        assert waits_in(process(pid)).startswith("its main thread is in state S")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signal": int(signal.SIGTERM)}, "it asks for signal 15, which the daemon does not send"),
        ({"signal": 10**30}, "which the daemon does not send"),
        ({"signal": "KILL"}, "it has not said how"),
        ({"signal": int(SIGNAL) + 1}, "it no longer has a handler of signal"),
        ({"thread": 1}, "its thread that takes the signal has ended"),
        ({"thread": -1}, "its thread that takes the signal has ended"),
        ({"thread": None}, "it has not said how"),
        ({"thread": float("inf")}, "it has not said how"),
    ],
)
def test_nothing_is_sent_to_whoever_asks_for_another_signal_or_thread(
    file: int, handler: int, changes: dict[str, object], words: str
) -> None:
    invite(file, **changes)
    before = os.fstat(file).st_size
    assert words in reason(os.getpid())
    assert os.fstat(file).st_size == before


@given(
    st.binary(max_size=60).map(lambda raw: raw + b"\n")
    | st.sampled_from([b"[" * 4000 + b"\n", b"{}", b"[1]\n"])
)
def test_a_damaged_first_line_sends_nothing(raw: bytes) -> None:
    file = os.memfd_create(contract.STACKS_FILE)
    try:
        os.write(file, raw)
        assert reason(os.getpid()) == "it has not said how it can be asked by a signal"
        assert os.fstat(file).st_size == len(raw)
    finally:
        os.close(file)


def test_nothing_is_sent_without_a_file_of_that_name(handler: int, file: int) -> None:
    invite(file)
    other = os.memfd_create("torchperfd-stack")
    os.dup2(other, file)
    os.close(other)
    assert reason(os.getpid()) == "it has not prepared for being asked by a signal"


def test_nothing_is_sent_to_a_process_that_has_the_id_of_another(file: int, handler: int) -> None:
    invite(file)
    with pytest.raises(GoneError):
        by_signal(os.getpid(), ticks=start_ticks(os.getpid()) - 1)
    assert reason(os.getpid(), namespace=HERE + 1).startswith("it runs in a pid namespace of its own")
    assert os.pread(file, 1 << 16, 0).count(b"\n") == 1


def test_what_is_stopped_or_has_ended_is_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = start_ticks(child.pid)
        look(process(child.pid))
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(StoppedError, match=f"kill -CONT {child.pid}"):
            look(process(child.pid))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(GoneError):
            look(process(child.pid))
    with pytest.raises(GoneError):
        look(process(child.pid, ticks))
    look(process(child.pid, ticks, namespace=HERE + 1))


def test_a_traced_process_is_named_with_its_tracer(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "70").mkdir()
    (tmp_path / "70/stat").write_text("70 (a) b) t " + " ".join(["0"] * 18 + ["9"] + ["0"] * 20))
    (tmp_path / "70/status").write_text("Name:\ta\nTracerPid:\t71\n")
    with pytest.raises(StoppedError, match="by a debugger, process 71"):
        look(RankProcess("r", 0, 70, (tmp_path / "self/ns/pid").stat().st_ino, 9), tmp_path)


PROGRESS = GroupProgress("0", "default_pg", 9, 9, "all_reduce", "4")


class Rankling:
    """A connected rank that answers as told."""

    def __init__(self, desk: StackDesk, answers: bool = True) -> None:
        self.desk, self.answers, self.asked = desk, answers, 0

    tells_stacks = True
    tells_collectives = True

    def dump_stacks(self, request_id: int) -> None:
        self.asked += 1
        if self.answers:
            self.desk.on_report(self, request_id, Report((FORWARD,), "forward", 118))

    def tell_collectives(self, request_id: int) -> None:
        self.asked += 1
        self.desk.on_collectives(self, request_id, (PROGRESS,))


def gather(desk: StackDesk, *targets: tuple[Rank, Rankling | None], seconds: float = 5.0) -> list[RankStacks]:
    async def run() -> list[RankStacks]:
        return [told async for told in desk.stacks(targets, seconds)]

    return sorted(asyncio.run(run()), key=lambda told: told.rank)


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


def test_each_rank_is_told_of_as_it_is() -> None:
    desk = StackDesk(wall=lambda: 1010.0)
    well, silent, gone = record(0), record(1), record(2, HERE)
    well.last_step_unix_seconds = 1000.0
    told = gather(
        desk,
        (well, Rankling(desk)),
        (silent, Rankling(desk, answers=False)),
        (gone, None),
        seconds=0.2,
    )
    assert [one.outcome for one in told] == [Outcome.ANSWERED, Outcome.NO_ANSWER, Outcome.GONE]
    assert (told[0].threads, told[0].phase, told[0].step) == ((FORWARD,), "forward", 118)
    assert (told[0].seconds_since_step, told[1].seconds_since_step) == (10.0, None)
    assert told[1].reason.startswith("no Python thread of it answers; it runs in a pid namespace of its own")
    assert told[2].reason == "the process has ended"


def test_only_a_rank_that_stands_still_is_asked_for_its_collectives() -> None:
    desk = StackDesk(wall=lambda: 1010.0)
    still, well, older = record(0), record(1), record(2)
    still.last_step_unix_seconds = older.last_step_unix_seconds = 1000.0
    well.last_step_unix_seconds = 1009.9
    asked = [Rankling(desk) for _ in range(3)]
    asked[2].tells_collectives = False
    told = gather(desk, *zip((still, well, older), asked, strict=True))
    assert [one.collectives for one in told] == [(PROGRESS,), (), ()]
    assert [one.asked for one in asked] == [2, 1, 1]


def test_a_record_that_is_stuck_costs_the_stacks_nothing() -> None:
    class Stuck(Rankling):
        def tell_collectives(self, request_id: int) -> None:
            self.asked += 1

    desk = StackDesk()
    stuck = Stuck(desk)
    (told,) = gather(desk, (record(0), stuck), seconds=0.2)
    assert (told.outcome, told.threads, told.collectives) == (Outcome.ANSWERED, (FORWARD,), ())
    assert stuck.asked == 2


def test_a_rank_cannot_answer_for_another_nor_twice_nor_late() -> None:
    desk = StackDesk()
    liar = Rankling(desk, answers=False)

    class Victim(Rankling):
        def dump_stacks(self, request_id: int) -> None:
            desk.on_report(liar, request_id, Report((), "lied", 0))
            super().dump_stacks(request_id)
            desk.on_report(self, request_id, Report((), "again", 0))

    (told,) = gather(desk, (record(0), Victim(desk)))
    desk.on_report(liar, 1, Report((), "late", 0))
    assert told.phase == "forward"


def test_over_the_wire_a_rank_is_asked_and_its_answer_told() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
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
        assert (await rank.hear()).HasField("welcome")
        call = control(channel).Stacks(control_pb2.StacksRequest(timeout_seconds=5))
        order = (await rank.hear()).dump_stacks
        thread = session_pb2.ThreadStack(ident=5, name="Main\x1b[2J", training=True)
        thread.frames.add(file="/job/train.py", line=41, function="forward")
        report = session_pb2.StackReport(
            request_id=order.request_id, threads=[thread], phase="forward", step=2**64 - 1
        )
        await rank.say(session_pb2.ClientMessage(stack_report=report))
        counted = session_pb2.CollectiveReport(request_id=(await rank.hear()).tell_collectives.request_id)
        counted.groups.add(name="0", description="a\x1b[2J", begun=9, number=9, call="all_reduce", sizes="4")
        await rank.say(session_pb2.ClientMessage(collective_report=counted))
        told = translate_stacks.rank_stacks(await call.read())
        assert await call.code() is grpc.StatusCode.OK
        assert (told.rank, told.world_size, told.pid) == (3, 4, 70)
        assert (told.outcome, told.phase, told.step) == (Outcome.ANSWERED, "forward", 2**62)
        assert told.collectives == (GroupProgress("0", "a?[2J", 9, 9, "all_reduce", "4"),)
        assert told.threads == (Thread(5, "Main?[2J", True, False, (Frame("/job/train.py", 41, "forward"),)),)
        await rank.leave()

    play(scenario)


def test_an_older_client_is_not_asked_what_it_does_not_know() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        rank = RankStream(channel)
        await rank.join(rank=1)
        message = await control(channel).Stacks(control_pb2.StacksRequest(timeout_seconds=5)).read()
        assert message.outcome == control_pb2.STACK_OUTCOME_NO_ANSWER
        assert message.reason.startswith("its torchperfd is older and cannot tell")
        await rank.leave()

    play(scenario)


Command = tuple[int, str, str]


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_from_a_thread() as served:
        yield served


class Answering(Session):
    """A rank that answers the daemon itself."""

    def __init__(self, rank: Rank, desk: StackDesk) -> None:
        super().__init__(rank, [contract.STACKS])
        self._desk = desk

    def dump_stacks(self, request_id: int) -> None:
        self._desk.on_report(self, request_id, Report((FORWARD,), "forward", 118))


def join(served: Served, rank: int, run: str = "bert-17", world_size: int = 2) -> Rank:
    joined = served.store.join(RankIdentity(run, rank, world_size, node="node-a", pid=4000 + rank))
    served.sessions._sessions[joined] = Answering(joined, served.sessions.stacks)
    return joined


def command(served: Served, capfd: pytest.CaptureFixture[str], *arguments: str) -> Command:
    code = cli._run(["stacks", "--socket", served.socket, *arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def test_the_command_tells_all_ranks_or_the_chosen_ones(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    join(served, 0)
    join(served, 1)
    assert command(served, capfd) == (
        0,
        "run bert-17: 2 ranks, no training step so far\n"
        "ranks 0-1 are at train.py:41 in forward\n\n"
        "ranks 0-1 are at train.py:41 in forward, step 118, phase forward\n"
        "  forward  /job/train.py:41\n",
        "",
    )
    code, out, err = command(served, capfd, "--json", "--ranks", "1", "--run", "bert-17")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["finding"], document["absent"]) == ("rank 1 is at train.py:41 in forward", [])
    assert [rank["rank"] for rank in document["ranks"]] == [1]


def test_ranks_that_are_not_here_make_it_partial(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    join(served, 1, world_size=4)
    code, out, err = command(served, capfd)
    assert code == 5
    assert "rank 1 is at train.py:41 in forward" in out
    assert err == "torchperfd: ranks 0,2-3 are not here: on other nodes, or gone for a minute\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--run", "nobody"), 3, "no run nobody on this node; `torchperfd ps` lists those there are"),
        (("--run", "bert-17", "--ranks", "0,7"), 3, "run bert-17 has no rank 7 on this node; it has 0"),
        ((), 3, "this node has 2 runs: bert-17, other; choose one with --run"),
        (("--ranks", "x"), 2, "'x' is no rank or range of ranks"),
        (("--timeout", "nan"), 2, "is not a time in seconds"),
    ],
)
def test_what_is_not_there_is_one_line_with_the_remedy(
    served: Served, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    join(served, 0)
    join(served, 0, run="other")
    got, out, err = command(served, capfd, *arguments)
    assert (got, out) == (code, "")
    assert words in err


def test_without_any_run_it_says_how_to_start_one(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(served, capfd) == (
        3,
        "",
        "torchperfd: this node has no run; start one with `torchperfd run`\n",
    )
