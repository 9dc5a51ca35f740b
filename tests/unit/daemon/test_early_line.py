"""A run that ends before a verdict is published: the verdict on its mean step has its line."""

import asyncio
import contextlib

import numpy as np
import pytest
from benchmarks.accuracy.streams import Job

from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.observer import LineSampler, Observer, observer
from torchperfd_daemon.service.node_survey import verdict_on
from torchperfd_daemon.stacks import Frame, Thread
from torchperfd_daemon.store import Rank, State, Store

RUN = "streamed"
METRICS = (Frame("/job/train.py", 18, "update", "int"), Frame("/job/train.py", 49, "main"))


class Run:
    """A run of one rank whose own code takes most of the step."""

    def __init__(self, seconds: float) -> None:
        self.store = Store(clock=lambda: 0.0)
        self.job = Job(self.store, 1, np.random.default_rng(0))
        self.job.train(seconds, lambda _rank, _step: {"other": 0.1})
        self.asked = 0
        self.observer = Observer(
            self.store,
            lambda _ranks, _seconds: pytest.fail("no stall"),
            clock=lambda: self.job.seconds,
            wall=lambda: self.job.wall,
            lines=LineSampler(self._ask, clock=lambda: self.job.seconds, sleep=lambda _: asyncio.sleep(0)),
        )

    async def _ask(self, _rank: Rank, _seconds: float) -> tuple[Thread, ...]:
        self.asked += 1
        return (Thread(1, "MainThread", True, False, METRICS),)

    def observe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Observe it for a moment in which no step ends, so that no verdict is published."""
        monkeypatch.setattr(observer, "SAMPLE_S", 0.0)

        async def a_moment() -> None:
            task = asyncio.create_task(self.observer.run())
            for _ in range(200):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(a_moment())

    def end(self) -> None:
        for rank in self.job.ranks:
            rank.state = State.FINISHED
        self.observer.sample()


def test_short_run_has_the_line_of_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(seconds=5)
    run.observe(monkeypatch)
    assert run.observer.verdict(RUN) is None, "none is published yet"
    run.end()
    verdict = verdict_on(RUN, run.job.ranks, run.observer.verdict)
    assert (verdict.cause, verdict.phase) == (Cause.SCRIPT_CODE, "other")
    assert verdict.line is not None
    assert (verdict.line.line, verdict.line.function) == (18, "update")
    assert run.asked == 20


def test_run_of_a_few_steps_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(seconds=1)
    run.observe(monkeypatch)
    run.end()
    assert verdict_on(RUN, run.job.ranks, run.observer.verdict).line is None
    assert run.asked == 0
