"""The queue: one at a time per run, in the order they came."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd_daemon.captures.attempt import QueueEntry, RunQueue
from torchperfd_daemon.errors import TorchperfdError


@given(st.lists(st.tuples(st.sampled_from("ab"), st.one_of(st.none(), st.integers(0, 20))), max_size=80))
def test_only_the_first_capture_of_each_run_may_start(moves: list[tuple[str, int | None]]) -> None:
    queue = RunQueue()
    lines: dict[str, list[QueueEntry]] = {"a": [], "b": []}
    for run, leaver in moves:
        line = lines[run]
        if leaver is not None:
            if leaver < len(line):
                queue.leave(line.pop(leaver))
        elif len(line) == 17:
            with pytest.raises(TorchperfdError, match=f"16 captures of run {run} are queued already"):
                queue.enter(run, wait=True)
        else:
            line.append(queue.enter(run, wait=True))
        for each in lines.values():
            assert [place.woken.is_set() for place in each] == [
                position == 0 for position in range(len(each))
            ]
        assert len(queue) == sum(map(len, lines.values()))


def test_capture_without_wait_is_refused_while_one_runs() -> None:
    queue = RunQueue()
    first = queue.enter("a", wait=False)
    with pytest.raises(TorchperfdError, match=r"a capture of run a is in progress; .* --queue"):
        queue.enter("a", wait=False)
    assert queue.enter("b", wait=False).woken.is_set()
    queue.leave(first)
    assert queue.enter("a", wait=False).woken.is_set()


def test_queue_every_capture_waits_for_an_automatic_one() -> None:
    queue = RunQueue()
    automatic = queue.enter("a", wait=False, automatic=True)
    users = queue.enter("a", wait=False)
    assert (automatic.woken.is_set(), users.woken.is_set()) == (True, False)
    for is_automatic in (False, True):
        with pytest.raises(TorchperfdError, match="a capture of run a is in progress"):
            queue.enter("a", wait=False, automatic=is_automatic)
    queue.leave(automatic)
    assert users.woken.is_set()


def test_queue_automatic_capture_waits_for_none() -> None:
    queue = RunQueue()
    first = queue.enter("a", wait=False, automatic=True)
    with pytest.raises(TorchperfdError, match="a capture of run a is in progress"):
        queue.enter("a", wait=False, automatic=True)
    queue.leave(first)
    assert queue.enter("a", wait=False, automatic=True).woken.is_set()


def test_waiting_capture_is_woken_by_the_previous_one() -> None:
    async def scenario() -> None:
        queue = RunQueue()
        first, second = queue.enter("a", wait=True), queue.enter("a", wait=True)
        woken = asyncio.create_task(second.woken.wait())
        await asyncio.sleep(0)
        assert not woken.done()
        queue.leave(first)
        await asyncio.wait_for(woken, 10)

    asyncio.run(scenario())
