"""The observer over a whole run: advice on its loader, and the line of a run that ends early."""

import asyncio
import contextlib
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from benchmarks.accuracy.streams import Job
from tests.support.values import some
from tests.unit.daemon.watched_job import RUN, Watched

from torchperfd.model.loader_facts import LoaderFacts
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer import observer
from torchperfd_daemon.observer.line_sampler import LineSampler
from torchperfd_daemon.observer.mean_step import loader_advice_of, verdict_on_mean_step
from torchperfd_daemon.observer.observer import Observer
from torchperfd_daemon.service.node_survey import verdict_on
from torchperfd_daemon.stacks.model import Frame, Thread
from torchperfd_daemon.store.model import State
from torchperfd_daemon.store.store import Rank, Store


class Loading(Watched):
    """A job whose ranks make their batches themselves, with noise, and wait rather than compute."""

    def __init__(self, seed: int) -> None:
        super().__init__(ranks=2, seed=seed, spread=0.1)
        self._random = random.Random(seed)

    def load(self, seconds: int, making: float) -> list[Verdict | None]:
        """Train so many seconds with batches that take so long to make."""
        reported = []
        for _ in range(seconds):
            seconds_more = making * self._random.lognormvariate(0, 0.3)
            self.job.train(1.0, partial(_waits, seconds_more))
            queued = self._random.uniform(0.0, 0.4)
            for rank in self.job.ranks:
                facts = LoaderFacts(0, 4.0, 0.05, 1.0, 2, 400_000, 16, batches_per_step=1.0, queued=queued)
                rank.totals = replace(rank.totals, loader=facts)
            self.observer.sample()
            reported.append(self.observer.verdict(RUN))
        return reported


def _waits(seconds: float, _rank: int, _step: int) -> dict[str, float]:
    return {"data": seconds}


def advised(reported: list[Verdict | None]) -> list[str]:
    """Return the settings that verdicts on the loader promise, each once in a row."""
    settings: list[str] = []
    for verdict in reported:
        for each in () if verdict is None else (verdict, *verdict.others):
            promises = each.cause is Cause.INPUT_BOUND and each.saves_seconds > 0
            if promises and each.fix not in settings[-1:]:
                settings.append(each.fix)
    return settings


@pytest.mark.parametrize("seed", range(3))
def test_steady_job_is_advised_one_setting_by_all_verdicts(seed: int) -> None:
    job = Loading(seed)
    [setting] = advised(job.load(120, 0.3))
    settled = some(job.observer.settle_loader_advice(RUN))
    assert setting.startswith(some(settled.advice).setting)
    assert all(rank.loader_advice == settled for rank in job.job.ranks)
    assert verdict_on_mean_step(RUN, job.job.ranks).fix == setting
    for rank in job.job.ranks:
        rank.state = State.FINISHED
    job.observer.sample()
    assert job.verdict.fix == setting
    assert loader_advice_of(job.job.ranks) == settled


def test_capture_in_the_first_seconds_settles_the_number() -> None:
    """By the mean of all steps; the run keeps it."""
    job = Loading(1)
    assert job.observer.settle_loader_advice(RUN) is None
    job.load(1, 0.3)
    assert job.observer.settle_loader_advice(RUN) is None, "two steps are too few"
    job.load(11, 0.3)
    settled = some(job.observer.settle_loader_advice(RUN))
    assert settled.advice is not None
    settings = advised(job.load(120, 0.3))
    assert len(settings) == 1
    assert settings[0].startswith(settled.advice.setting)


def test_run_that_ends_before_it_is_settled_has_one_number() -> None:
    job = Loading(2)
    job.load(14, 0.3)
    for rank in job.job.ranks:
        rank.state = State.FINISHED
    job.observer.sample()
    settled = some(job.observer.settle_loader_advice(RUN))
    assert settled.advice is not None
    verdict = job.observer.verdict(RUN) or verdict_on_mean_step(RUN, job.job.ranks)
    assert verdict.cause is Cause.INPUT_BOUND
    assert verdict.fix.startswith(settled.advice.setting)


def test_loader_twice_as_slow_changes_what_the_setting_saves() -> None:
    job = Loading(0)
    job.load(60, 0.3)
    before = some(job.observer.settle_loader_advice(RUN))
    job.load(60, 0.9)
    after = some(job.observer.settle_loader_advice(RUN))
    assert some(after.advice).saves_seconds > 1.5 * some(before.advice).saves_seconds


EARLY_RUN = "streamed"
METRICS = (Frame("/job/train.py", 18, "update", "int"), Frame("/job/train.py", 49, "main"))


class EarlyRun:
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
        monkeypatch.setattr(observer, "until_next_round", lambda: 0.0)

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
    run = EarlyRun(seconds=5)
    run.observe(monkeypatch)
    assert run.observer.verdict(EARLY_RUN) is None, "none is published yet"
    run.end()
    verdict = verdict_on(EARLY_RUN, run.job.ranks, run.observer.verdict)
    assert (verdict.cause, verdict.phase) == (Cause.SCRIPT_CODE, "other")
    assert verdict.line is not None
    assert (verdict.line.line, verdict.line.function) == (18, "update")
    assert run.asked == 20


def test_run_of_a_few_steps_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EarlyRun(seconds=1)
    run.observe(monkeypatch)
    run.end()
    assert verdict_on(EARLY_RUN, run.job.ranks, run.observer.verdict).line is None
    assert run.asked == 0
