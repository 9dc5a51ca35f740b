"""Sampling a rank that waits for its data: when, how often, and the line on the verdict."""

import asyncio
from dataclasses import replace

import pytest
from tests.support.values import some

from torchperfd_daemon.diagnosis.verdict import Cause, Verdict
from torchperfd_daemon.observer.line_sampler import AGAIN_AFTER_S, BETWEEN_S, MAX_SAMPLES, LineSampler
from torchperfd_daemon.stacks.model import Frame, Thread
from torchperfd_daemon.store.model import RankIdentity
from torchperfd_daemon.store.store import Rank

TORCH = "/env/lib/python3.11/site-packages/torch/utils/data"
LOOP = Frame(f"{TORCH}/_utils/worker.py", 374, "_worker_loop", "fetch")
IDLE = replace(LOOP, line=330, call="get")
WAITS = (Frame(f"{TORCH}/dataloader.py", 788, "_next_data"), Frame("/job/train.py", 20, "<module>"))
FETCHES = (Frame("/job/data.py", 37, "__getitem__", "sleep"), Frame(f"{TORCH}/_utils/fetch.py", 54, "fetch"))
VERDICT = Verdict(Cause.INPUT_BOUND, "bert", "a", None, "data", "waits", 0.1, "")


def training(*frames: Frame) -> Thread:
    return Thread(1, "MainThread", True, False, frames)


def worker(number: int, *frames: Frame) -> Thread:
    return Thread(0, "", False, False, frames, 4000 + number, number)


BUSY = (training(*WAITS), worker(0, *FETCHES, LOOP), worker(1, *FETCHES, LOOP), worker(2, IDLE))


class Sampled:
    """A sampler of one rank that gives prepared answers, on a clock of its own."""

    def __init__(self, answer: tuple[Thread, ...] | None = BUSY) -> None:
        self.answer, self.asked, self.now = answer, 0, 0.0
        self.capturing: set[str] = set()
        self.rank = Rank(RankIdentity("bert", 0, world_size=2, node="a", pid=70), 0.0)
        self.sampler = LineSampler(self._ask, lambda run: run in self.capturing, lambda: self.now, self.sleep)

    async def _ask(self, rank: Rank, seconds: float) -> tuple[Thread, ...] | None:
        assert rank is self.rank
        self.asked += 1
        return self.answer

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def sample(self, verdict: Verdict = VERDICT) -> None:
        asyncio.run(self.sampler.sample(verdict, self.rank))

    @property
    def is_due(self) -> bool:
        return self.sampler.due([VERDICT], [self.rank]) is not None


def test_sampler_names_the_workers_line_and_stops_once_certain() -> None:
    sampled = Sampled()
    assert sampled.is_due
    sampled.sample()
    line = some(sampled.sampler.with_lines(VERDICT).line)
    assert (line.file, line.line, line.function, line.call) == ("/job/data.py", 37, "__getitem__", "sleep")
    assert (line.stage, line.share, line.in_workers) == ("fetch", 1.0, True)
    assert sampled.asked < MAX_SAMPLES / 2
    assert not sampled.is_due


def test_sampler_of_a_loader_without_workers_names_its_line() -> None:
    sampled = Sampled((training(*FETCHES, *WAITS),))
    sampled.sample()
    line = some(
        sampled.sampler.with_lines(replace(VERDICT, cause=Cause.NONE, others=(VERDICT,))).others[0].line
    )
    assert (line.line, line.in_workers) == (37, False)


def test_sampler_with_nothing_but_waits_keeps_to_the_limit() -> None:
    sampled = Sampled((training(*WAITS), worker(0, IDLE)))
    sampled.sample()
    assert sampled.asked == MAX_SAMPLES
    assert sampled.sampler.with_lines(VERDICT) is VERDICT
    assert not sampled.is_due
    sampled.now += AGAIN_AFTER_S
    assert sampled.is_due


def test_sampler_rests_between_the_verdicts_of_a_run() -> None:
    sampled = Sampled()
    sampled.sample()
    other = replace(VERDICT, rank=0)
    assert sampled.sampler.due([other], [sampled.rank]) is None
    sampled.now += BETWEEN_S
    assert sampled.sampler.due([other], [sampled.rank]) == (other, sampled.rank)


def test_sampler_gives_up_on_a_rank_that_does_not_answer() -> None:
    sampled = Sampled(None)
    sampled.sample()
    assert sampled.asked == 3


def test_sampler_leaves_a_captured_run_alone() -> None:
    sampled = Sampled()
    sampled.capturing.add("bert")
    assert not sampled.is_due
    sampled.sample()
    assert sampled.asked == 0


def test_sampler_samples_a_lasting_verdict_again() -> None:
    sampled = Sampled()
    sampled.sample()
    sampled.now += AGAIN_AFTER_S
    assert sampled.is_due
    sampled.sampler.forget_others(["another"])
    assert sampled.sampler.with_lines(VERDICT) is VERDICT


MODEL = (
    Frame("/job/model.py", 12, "forward", "roll"),
    Frame("/env/lib/python3.11/site-packages/torch/nn/modules/module.py", 1700, "_call_impl"),
    Frame("/job/train.py", 20, "<module>"),
)
AUGMENT = (Frame("/job/train.py", 50, "augment", "crop"), Frame("/job/train.py", 20, "<module>"))
COUNTS = (Frame("/job/train.py", 12, "confusion", "item"), Frame("/job/train.py", 39, "<module>"))
SLOW = replace(VERDICT, cause=Cause.SLOW_RANK, rank=0)
OWN = replace(VERDICT, cause=Cause.SCRIPT_CODE, phase="other")


@pytest.mark.parametrize(
    ("verdict", "frames", "expected"),
    [
        (replace(SLOW, phase="other"), AUGMENT, ("other", "/job/train.py", 50, "augment", "crop")),
        (replace(SLOW, phase="augment"), AUGMENT, ("other", "/job/train.py", 50, "augment", "crop")),
        (replace(SLOW, phase="forward"), MODEL, ("forward", "/job/model.py", 12, "forward", "roll")),
        (
            replace(VERDICT, cause=Cause.HOST_BOUND, phase=""),
            *(MODEL, ("forward", "/job/model.py", 12, "forward", "roll")),
        ),
        (OWN, AUGMENT, ("other", "/job/train.py", 50, "augment", "crop")),
        (OWN, COUNTS, ("other", "/job/train.py", 12, "confusion", "item")),
        (replace(SLOW, phase="other"), COUNTS, None),
        (replace(SLOW, phase="forward"), AUGMENT, None),
        (replace(SLOW, phase="other"), MODEL, None),
        (replace(SLOW, phase="other"), WAITS, None),
    ],
)
def test_sampler_names_the_line_of_the_hosts_work(
    verdict: Verdict, frames: tuple[Frame, ...], expected: tuple[str, str, int, str, str] | None
) -> None:
    sampled = Sampled((training(*frames), worker(0, *FETCHES, LOOP)))
    assert sampled.sampler.due([verdict], [sampled.rank]) is not None
    sampled.sample(verdict)
    line = sampled.sampler.with_lines(verdict).line
    found = (line.stage, line.file, line.line, line.function, line.call) if line else None
    assert found == expected
    assert line is None or line.of_step


def test_sampler_without_a_line_of_the_step_reports_nothing() -> None:
    """The loader's slow stage is worth a line without a place; that the forward is slow is known."""
    spread = [(replace(MODEL[0], line=number), *MODEL[1:]) for number in range(40)]
    sampled = Sampled()

    async def ask(rank: Rank, seconds: float) -> tuple[Thread, ...]:
        return (training(*spread.pop()),)

    sampled.sampler = LineSampler(ask, sleep=sampled.sleep)
    sampled.sample(replace(SLOW, phase="forward"))
    assert not spread
    assert sampled.sampler.with_lines(replace(SLOW, phase="forward")).line is None


@pytest.mark.parametrize(
    "verdict",
    [
        replace(SLOW, phase="backward"),
        replace(SLOW, phase="collective_wait"),
        replace(SLOW, phase=""),
        replace(VERDICT, cause=Cause.GARBAGE_COLLECTION, phase=""),
        replace(VERDICT, cause=Cause.NONE, phase="forward", cost_seconds_per_step=0.0),
        replace(VERDICT, rank=1),
    ],
)
def test_sampler_ignores_verdicts_that_no_line_explains(verdict: Verdict) -> None:
    sampled = Sampled()
    assert sampled.sampler.due([verdict], [sampled.rank]) is None


def test_sampler_names_the_call_of_a_spread_function() -> None:
    """No line of the function takes most of the time; the line that calls it does."""
    main = (Frame("/job/train.py", 39, "main"), Frame("/job/train.py", 60, "<module>"))
    loss = (Frame("/job/train.py", 41, "main"), Frame("/job/train.py", 60, "<module>"))
    engine = "/env/lib/python3.11/site-packages/torch/autograd/graph.py"
    backward = (Frame(engine, 869, "_engine_run_backward"), *loss)
    sampled, stacks = Sampled(), []
    for number in range(MAX_SAMPLES):
        inner = Frame("/job/train.py", 12 + number % 3, "confusion")
        stacks.append(backward if number % 5 == 0 else (inner, *main))

    async def ask(rank: Rank, seconds: float) -> tuple[Thread, ...]:
        return (training(*stacks.pop()),)

    sampled.sampler = LineSampler(ask, sleep=sampled.sleep)
    sampled.sample(OWN)
    line = some(sampled.sampler.with_lines(OWN).line)
    assert line.words == "train.py:39 in main, calls confusion: 100% of the host's work (other 100%)"


SPINS = Thread(2, "Thread-1", False, False, (Frame("/job/train.py", 9, "uploader", "str"),))
WAITING = Thread(
    3, "Thread-2", False, False, (Frame("/env/lib/python3.11/threading.py", 324, "wait", "acquire"),)
)
PINS = Thread(4, "Thread-3", False, False, (Frame("/job/train.py", 70, "idle", "sleep"),))
OURS = Thread(5, "torchperfd-flusher", False, True, (Frame("/job/train.py", 1, "flush"),))
BLOCKED = Verdict(Cause.INTERPRETER_LOCK, "bert", "a", 0, "", "blocked", 0.1, "")


def test_sampler_names_the_thread_that_holds_the_interpreter() -> None:
    sampled = Sampled()

    async def threads_of(_rank: Rank, _seconds: float) -> tuple[Thread, ...]:
        return training(Frame("/job/train.py", 20, "main")), SPINS, WAITING, PINS, OURS

    async def never(_rank: Rank, _seconds: float) -> None:
        raise AssertionError("the threads are to be asked")

    sampler = LineSampler(never, sleep=sampled.sleep, threads_of=threads_of)
    assert sampler.due([BLOCKED], [sampled.rank]) is not None
    asyncio.run(sampler.sample(BLOCKED, sampled.rank))
    line = some(sampler.with_lines(BLOCKED).line)
    assert (line.line, line.function, line.stage, line.of_step) == (9, "uploader", "thread", False)
    assert line.words == "train.py:9 in uploader, calls str: 100% of the time of other threads"
    assert sampled.rank.blocked_by == "uploader() at train.py:9"


def test_sampler_names_no_thread_where_all_wait() -> None:
    sampled = Sampled((training(Frame("/job/train.py", 20, "main")), WAITING, PINS, OURS))
    sampled.sample(BLOCKED)
    assert sampled.sampler.with_lines(BLOCKED).line is None
    assert sampled.rank.blocked_by == ""
