"""The frames that ``top`` reads of a daemon."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.served import GIVE_UP_S, Served, serving_from_a_thread
from tests.unit.daemon.live_runs import train

from torchperfd_cli.commands._scope import Scope
from torchperfd_cli.commands._top_feed import Feed
from torchperfd_cli.commands._top_state import Frame
from torchperfd_daemon.errors import DaemonUnreachableError, NoSuchTargetError


class Frames:
    """Waits for frames of a feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._changed = threading.Event()

    def go_on(self) -> None:
        self._feed.go_on(self._changed.set)

    def next(self) -> Frame:
        self._changed.clear()
        assert self._changed.wait(GIVE_UP_S)
        return self._feed.frame()


@contextmanager
def following(socket: str, scope: Scope | None = None) -> Iterator[Feed]:
    feed = Feed(scope or Scope(), socket)
    feed.start()
    try:
        yield feed
    finally:
        feed.stop()


def slow_ranks(frame: Frame) -> list[int]:
    return [rank.rank for run in frame.runs for rank in run.ranks if rank.slow]


def test_first_frame_has_ranks_that_later_ones_compare(served: Served) -> None:
    train(served.store, "one straggler")
    with following(served.socket) as feed:
        first = feed.frame()
        [run] = first.runs
        assert [rank.step_seconds > 0 for rank in run.ranks] == [True] * 4
        assert {rank.phase_seconds["forward"] > 0 for rank in run.ranks} == {True}
        assert (first.node, run.here, run.waits, slow_ranks(first)) == ("node-a", 4, True, [])
        frames = Frames(feed)
        frames.go_on()
        assert slow_ranks(frames.next()) == [2]


def test_feed_without_a_daemon_has_its_error(tmp_path: Path) -> None:
    with following(str(tmp_path / "none")) as feed, pytest.raises(DaemonUnreachableError):
        feed.frame()


def test_feed_of_a_run_that_is_not_there_has_its_error(served: Served) -> None:
    with following(served.socket, Scope("gone")) as feed, pytest.raises(NoSuchTargetError):
        feed.frame()


def test_daemon_that_ends_is_a_problem_of_the_last_frame() -> None:
    with ExitStack() as daemon:
        served = daemon.enter_context(serving_from_a_thread())
        train(served.store, "healthy")
        with following(served.socket) as feed:
            frames = Frames(feed)
            feed.frame()
            frames.go_on()
            daemon.close()
            while not (last := frames.next()).problem:
                pass
            assert [run.run for run in last.runs] == ["bert-17"]


@pytest.mark.parametrize(
    ("module", "later"), [("top", {"numpy", "textual", "msgspec"}), ("_top_app", {"numpy", "msgspec"})]
)
def test_top_opens_without_what_it_needs_later(module: str, later: set[str]) -> None:
    script = f"import sys, torchperfd_cli.commands.{module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert later & set(done.stdout.split()) == set()
