"""The pulse desk: what it sees of ranks that do not report, whom it asks, and how seldom."""

import asyncio
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.served import RankStream, Served, control, hello, play

from torchperfd.v1 import contract, control_pb2, session_pb2
from torchperfd_daemon.collectors import procfs
from torchperfd_daemon.collectors.procfs import parse_stat, read
from torchperfd_daemon.collectors.ranks import RankProcess, own_namespace
from torchperfd_daemon.service.pulse import Pulse, PulseDesk
from torchperfd_daemon.store import Rank, RankIdentity, State, Totals

PROC = Path("/proc")
WALL = 1_700_000_000.0


@contextmanager
def shared_file(content: bytes, name: str = contract.PULSE_FILE) -> Iterator[int]:
    """Keep a file in memory open, as a training process does."""
    file = os.memfd_create(name)
    try:
        os.write(file, content)
        yield file
    finally:
        os.close(file)


def ourselves(**other: int) -> RankProcess:
    """Return this process, as a rank."""
    told = {
        "pid": os.getpid(),
        "pid_namespace": own_namespace(PROC),
        "start_ticks": parse_stat(read("/proc/self/stat")).start_ticks,
    }
    return RankProcess("r", 0, **{**told, **other})


def test_the_file_of_a_process_is_found_and_read() -> None:
    with shared_file(struct.pack("=qq", 7, 3_500_000_000)) as file:
        pulse = Pulse.open(ourselves())
        assert pulse is not None
        assert pulse.read() == (7, 3.5)
        os.pwrite(file, struct.pack("=qq", 8, 4 * 10**9), 0)
        assert pulse.read() == (8, 4.0)
        pulse.close()


def test_a_file_that_is_too_short_is_no_pulse() -> None:
    with shared_file(b"short"):
        pulse = Pulse.open(ourselves())
        assert pulse is not None
        with pytest.raises(ValueError, match="a pulse cannot be read"):
            pulse.read()
        pulse.close()


@pytest.mark.parametrize("other", [{"pid": 2**22 + 1}, {"start_ticks": 1}, {"pid_namespace": 1}])
def test_of_another_process_with_its_id_nothing_is_seen(other: dict[str, int]) -> None:
    with shared_file(bytes(16)):
        assert Pulse.open(ourselves(**other)) is None


def test_a_process_that_keeps_none_has_none() -> None:
    assert Pulse.open(ourselves()) is None
    with shared_file(bytes(16), name="other"):
        assert Pulse.open(ourselves()) is None


@pytest.mark.parametrize("kind", ["fifo", "file"])
def test_open_memory_file_by_a_false_link_opens_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = tmp_path / "false"
    os.mkfifo(false) if kind == "fifo" else false.write_bytes(bytes(16))
    process = tmp_path / "proc"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to(false)
    monkeypatch.setattr(os, "readlink", lambda _: f"/memfd:{contract.PULSE_FILE} (deleted)")
    # Opening the FIFO would wait for a writer that never comes.
    assert procfs.open_memory_file(process, contract.PULSE_FILE, os.O_RDONLY) is None


class Beating:
    """A rank that makes steps by a clock of its own, and the desk that looks at it."""

    def __init__(self, desk: "Desk", number: int, run: str = "r") -> None:
        self.record = Rank(RankIdentity(run, number), 0.0)
        self.record.state = State.TRAINING
        self.count = 0
        self.at = 0.0
        self.asked = 0
        self.closed = False
        self.broken = False
        self.answers = True
        self._desk = desk

    def read(self) -> tuple[int, float]:
        if self.broken:
            raise ValueError("gone")
        return self.count, self.at

    def close(self) -> None:
        self.closed = True

    def tell_steps(self) -> None:
        self.asked += 1
        if self.answers:
            self.record.totals = Totals()


class Desk:
    """A desk whose clock a test moves, and its ranks."""

    def __init__(self, *runs: str) -> None:
        self.now = 100.0
        self.wall_ahead = WALL
        self.ranks: list[Beating] = []
        self.desk = PulseDesk(
            lambda process: self.ranks[process.rank],  # type: ignore[arg-type, return-value]
            lambda: self.now,
            lambda: self.wall_ahead + self.now,
        )
        for number, run in enumerate(runs or ("r",)):
            self.ranks.append(Beating(self, number, run))
            assert self.admit(self.ranks[-1])

    def admit(self, rank: Beating) -> bool:
        """Have the desk find a rank's pulse, and follow it."""
        pulse = self.desk.find(rank.record)
        assert pulse is not None
        return self.desk.admit(rank, pulse)

    def go_on(self, *paces: float, of: Sequence[int] | None = None) -> list[int]:
        """Let a second go by for each pace, steps per second; return how often the first was asked."""
        asked = []
        for pace in paces:
            self.now += 1
            for rank in self.ranks if of is None else [self.ranks[number] for number in of]:
                rank.count += int(pace)
                rank.at = self.now - 0.25 if pace else rank.at
            self.desk.look()
            asked.append(self.ranks[0].asked)
        return asked


def test_a_rank_that_goes_on_is_seen_and_not_asked() -> None:
    desk = Desk()
    assert desk.go_on(*[1000] * 60) == [0] * 60
    rank = desk.ranks[0].record
    assert (rank.beats, rank.beat_at) == (60_000, 159.75)
    assert rank.last_step_unix_seconds == WALL + 159.75
    desk.go_on(*[0] * 5)
    assert (rank.beats, rank.beat_at) == (60_000, 159.75)


@given(st.lists(st.floats(915, 1085), min_size=1, max_size=60))
def test_noise_is_no_reason_to_ask(paces: list[float]) -> None:
    desk = Desk()
    assert desk.go_on(*paces)[-1] == 0


def test_a_single_look_that_differs_is_no_reason_to_ask() -> None:
    desk = Desk()
    for _ in range(5):
        assert desk.go_on(*[1000] * 7, 300)[-1] == 0
    assert desk.go_on(*[1000] * 7, 0)[-1] == 0


@pytest.mark.parametrize("pace", [0, 500, 790, 1250, 4000])
def test_another_pace_is_asked_about_at_the_second_look_and_a_few_times_more(pace: float) -> None:
    desk = Desk()
    desk.ranks[0].answers = False
    desk.go_on(*[1000] * 10)
    assert desk.go_on(*[pace] * 20) == [0, 1, 2, 3, *[4] * 16]


def test_a_restless_pace_is_asked_about_every_sixteenth_second_at_most() -> None:
    desk = Desk()
    paces = [400 if second // 10 % 2 else 1000 for second in range(320)]
    assert desk.go_on(*paces)[-1] <= 4 * 320 / 16


def test_a_change_too_soon_after_another_is_asked_about_later() -> None:
    desk = Desk()
    desk.go_on(*[1000] * 10)
    assert desk.go_on(*[500] * 10)[-1] == 4
    assert desk.go_on(*[250] * 12)[-1] == 8


@given(st.lists(st.sampled_from([0, 1, 2, 20, 40]), min_size=1, max_size=60))
def test_of_long_steps_nobody_is_asked(paces: list[int]) -> None:
    desk = Desk()
    assert desk.go_on(*paces)[-1] == 0


def test_who_reports_is_not_asked() -> None:
    desk = Desk()
    for second in range(40):
        desk.ranks[0].record.totals = Totals()
        assert desk.go_on(300 if second > 20 else 1000) == [0]


def test_all_ranks_of_the_run_are_asked_together() -> None:
    desk = Desk("r", "r", "other")
    desk.go_on(*[1000] * 10)
    for _ in range(3):
        desk.go_on(1000, of=[1, 2])
    assert [rank.asked for rank in desk.ranks] == [2, 2, 0]


def test_who_trains_again_is_asked_for_what_it_says_it_does() -> None:
    desk = Desk()
    desk.go_on(*[1000] * 10)
    desk.ranks[0].record.state = State.VALIDATING
    assert desk.go_on(1000) == [1]


def test_a_clock_of_another_time_namespace_dates_no_step_outside_the_second_it_was_seen_in() -> None:
    desk = Desk()
    for ahead, expected in ((-1e6, 100.0), (1e6, 102.0)):
        desk.now += 1
        desk.ranks[0].count += 1000
        desk.ranks[0].at = desk.now + ahead
        desk.desk.look()
        assert desk.ranks[0].record.beat_at == expected


def test_a_pulse_that_cannot_be_read_any_more_leaves_the_others_seen() -> None:
    desk = Desk("r", "r")
    desk.ranks[0].broken = True
    desk.go_on(1000)
    assert [rank.record.beats for rank in desk.ranks] == [0, 1000]
    late = Beating(desk, 2)
    late.broken = True
    desk.ranks.append(late)
    assert not desk.admit(late)
    assert late.closed


def test_who_leaves_is_let_go() -> None:
    desk = Desk("r", "r")
    desk.desk.dismiss(desk.ranks[0])
    desk.desk.dismiss(desk.ranks[0])
    desk.go_on(1000)
    assert [rank.closed for rank in desk.ranks] == [True, False]
    assert [rank.record.beats for rank in desk.ranks] == [0, 1000]


def test_who_looks_has_the_stale_ranks_report_first() -> None:
    desk = Desk("r", "r", "other")
    desk.go_on(*[1000] * 5)
    for _ in range(2):
        asyncio.run(desk.desk.freshen([rank.record for rank in desk.ranks[:2]]))
        assert [rank.asked for rank in desk.ranks] == [1, 1, 0], "who has just reported is not asked"
    asyncio.run(desk.desk.freshen())
    assert [rank.asked for rank in desk.ranks] == [1, 1, 1]


def test_who_looks_does_not_wait_for_who_does_not_answer() -> None:
    desk = Desk("r")
    desk.ranks[0].answers = False
    desk.go_on(*[1000] * 5)
    for _ in range(2):
        asyncio.run(asyncio.wait_for(desk.desk.freshen([desk.ranks[0].record]), 20))
        assert desk.ranks[0].asked == 1, "nor is it asked again while it makes no step"
    desk.go_on(1000)
    asyncio.run(asyncio.wait_for(desk.desk.freshen([desk.ranks[0].record]), 20))
    assert desk.ranks[0].asked == 2


def beating_hello(keeps: bool = True) -> session_pb2.ClientMessage:
    process = ourselves()
    message = hello(
        pid=process.pid, pid_namespace=process.pid_namespace, process_start_ticks=process.start_ticks
    )
    if keeps:
        message.hello.features.append(contract.PULSE)
    return message


@pytest.mark.parametrize(("keeps", "is_there"), [(True, True), (True, False), (False, True)])
def test_a_rank_is_told_whether_its_pulse_is_seen(keeps: bool, is_there: bool) -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        rank = RankStream(channel)
        await rank.say(beating_hello(keeps))
        welcome = (await rank.hear()).welcome
        assert (contract.PULSE in welcome.features) == (keeps and is_there)
        assert set(contract.FEATURES) <= set(welcome.features)
        await rank.leave()

    with shared_file(bytes(16), contract.PULSE_FILE if is_there else "other"):
        play(scenario)


def test_a_session_is_followed_until_it_ends_and_asked_when_somebody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchperfd_daemon.service.pulse._STALE_S", -1.0)

    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        rank = RankStream(channel)
        await rank.say(beating_hello())
        await rank.hear()
        [kept] = served.store.ranks()
        os.pwrite(file, struct.pack("=qq", 500, 0), 0)
        served.sessions.pulses.look()
        assert kept.beats == 500
        asking = asyncio.ensure_future(control(channel).ListRuns(control_pb2.ListRunsRequest()))
        assert (await rank.hear()).HasField("tell_steps")
        account = session_pb2.Account(
            kinds=[session_pb2.KindAccount(kind=session_pb2.STEP_KIND_TRAIN, steps=500)]
        )
        await rank.say(session_pb2.ClientMessage(account=account))
        assert (await asking).runs[0].ranks[0].steps == 500
        await rank.leave()
        os.pwrite(file, struct.pack("=qq", 900, 0), 0)
        served.sessions.pulses.look()
        assert kept.beats == 500

    with shared_file(bytes(16)) as file:
        play(scenario)
