"""The newest steps and readings that the daemon holds, as commands get them; and ``top`` on a terminal."""

import contextlib
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.served import GIVE_UP_S, Served, control, play, serving_from_a_thread
from tests.unit.daemon.live_runs import STEPS, train

from torchperfd.v1 import control_pb2
from torchperfd_daemon.store import HISTORY_STEPS, History, StepColumns

batches = st.lists(st.lists(st.integers(1, 10**12), max_size=20), max_size=8)


@given(batches, st.integers(1, 12), st.integers(0, 20))
def test_the_newest_steps_are_the_last_that_came(
    durations: list[list[int]], capacity: int, wanted: int
) -> None:
    history = History(capacity)
    rows: list[tuple[int, int, int, int]] = []
    for number, batch in enumerate(durations):
        # The second phase comes and goes.
        phases = {"data": array("q", batch)}
        if number % 2:
            phases["augment"] = array("q", [duration + 1 for duration in batch])
        ends = array("q", [len(rows) + place for place in range(len(batch))])
        history.append(StepColumns(ends, array("q", batch), phases))
        rows += [
            (end, duration, duration, duration + 1 if number % 2 else 0)
            for end, duration in zip(ends, batch, strict=True)
        ]
    newest = history.newest(wanted)
    columns = [
        newest.end_unix_ns,
        newest.duration_ns,
        *(newest.phases.get(name) for name in ("data", "augment")),
    ]
    kept = rows[-capacity:][len(rows[-capacity:]) - min(wanted, len(rows[-capacity:])) :]
    for place, column in enumerate(columns):
        expected = [row[place] for row in kept]
        assert (list(column) if column is not None else [0] * len(kept)) == expected


def test_steps_are_columns_with_the_index_of_the_first() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        train(served.store, "one straggler")
        reported = (await control(channel).GetSteps(control_pb2.GetStepsRequest(ranks=[1, 2]))).ranks
        assert [each.status.identity.rank for each in reported] == [1, 2]
        for each in reported:
            assert (each.count, each.first_step) == (STEPS, 1000 - STEPS)
            assert [pauses.calls for pauses in each.gc] == [2000, 0, 10]
            columns = [each.duration_ns, *(phase.ns for phase in each.phases)]
            whole, *parts = (memoryview(column).cast("q").tolist() for column in columns)
            assert list(map(sum, zip(*parts, strict=True))) == whole
        few = (await control(channel).GetSteps(control_pb2.GetStepsRequest(newest=3, ranks=[2]))).ranks[0]
        assert (few.count, few.first_step) == (3, 997)
        assert few.duration_ns == reported[1].duration_ns[-24:]
        many = await control(channel).GetSteps(control_pb2.GetStepsRequest(newest=HISTORY_STEPS + 1))
        assert [each.count for each in many.ranks] == [STEPS] * 4

    play(scenario)


def test_what_is_not_there_is_not_found() -> None:
    async def scenario(served: Served, channel: grpc.aio.Channel) -> None:
        train(served.store, "healthy")
        for request in ({"run": "gone"}, {"ranks": [1, 9]}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await control(channel).GetSteps(control_pb2.GetStepsRequest(**request))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await control(channel).GetReadings(control_pb2.GetReadingsRequest())).readings == []

    play(scenario)


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Run a command on a terminal of its own; yield it and our end."""
    ours, theirs = os.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
            os.close(theirs)
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(ours)


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_top_draws_on_a_terminal_until_it_is_ended(way: str) -> None:
    with serving_from_a_thread() as served:
        train(served.store, "one straggler")
        command = (sys.executable, "-m", "torchperfd", "top", "--socket", served.socket)
        with terminal(*command) as (process, ours):
            seen = b""
            while "╰".encode() not in seen:
                seen += os.read(ours, 65536)
            if way == "q":
                os.write(ours, b"xq")
            else:
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):
                while more := os.read(ours, 65536):
                    seen += more
            assert process.wait(GIVE_UP_S) == 0, seen
    assert b"bert-17" in seen
    assert b"\x1b[?1049h" in seen
    assert b"\x1b[?1049l" in seen, "the terminal is as it was"
