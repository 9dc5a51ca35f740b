"""The stages of making a batch: timed in this process, sampled in workers."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchperfd.hooks import loader_samples
from torchperfd.hooks.loader_samples import StageSamples, stage_of
from torchperfd.hooks.worker_stacks import StackLine, WorkerStack, WorkerStacks
from torchperfd.model.source_lines import InputStages

TORCH = "/env/site-packages/torch/utils/data/_utils"
FETCHES = StackLine(f"{TORCH}/worker.py", 374, "_worker_loop", "fetch")
FETCH = StackLine(f"{TORCH}/fetch.py", 54, "fetch", "")
COLLATE = FETCH._replace(line=57, call="collate_fn")
OWN = StackLine("/job/data.py", 37, "__getitem__", "sleep")
STARTED = StackLine("/env/lib/python3.11/multiprocessing/process.py", 108, "run", "")


class Workers(WorkerStacks):
    """Stacks that a test prepares, one for each request."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls, self.asked = list(calls), list[int]()

    def read(self, seconds: float, pids: Sequence[int] | None = None, most: int = 1) -> list[WorkerStack]:
        assert pids is not None
        self.asked += pids
        call = self.calls.pop(0)
        inner = {"fetch": [OWN, FETCH], "collate": [OWN, COLLATE]}.get(call, [])
        return [WorkerStack(pids[0], 0, [*inner, FETCHES._replace(call=call), STARTED])]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nanoseconds that only the dataset and the collate function let pass."""
    now = [0]
    monkeypatch.setattr(loader_samples, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    return now


class Items(Dataset[Any]):
    def __init__(self, clock: list[int]) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.clock[0] += 5
        return index


@pytest.mark.parametrize(
    ("lines", "stage"),
    [
        ([OWN, FETCH, FETCHES, STARTED], "fetch"),
        ([OWN, COLLATE, FETCHES, STARTED], "collate"),
        ([FETCHES._replace(call="get"), STARTED], "idle"),
        ([FETCHES._replace(call="put"), STARTED], "send"),
        ([OWN, FETCHES._replace(call="init_fn")], "other"),
        # A forked worker of a loader within a loader: the outer fetch is that of its parent.
        ([FETCHES._replace(call="get"), STARTED, OWN, FETCH], "idle"),
        ([OWN, FETCH], "other"),
        ([], "other"),
    ],
)
def test_stage_of_a_workers_stack(lines: list[StackLine], stage: str) -> None:
    assert stage_of(lines) == stage


def test_timed_draw_divides_fetch_and_collate(clock: list[int]) -> None:
    def collate(items: list[int]) -> torch.Tensor:
        clock[0] += 7
        return torch.tensor(items)

    iterator: Any = iter(DataLoader(Items(clock), batch_size=2, collate_fn=collate))
    samples = StageSamples(WorkerStacks())
    for first in (0, 2):
        assert samples.timed(iterator, iterator._next_data).tolist() == [first, first + 1]
        assert iterator._dataset_fetcher.collate_fn is collate
    assert samples.means(0, None) == InputStages(0, 2, 10e-9, 7e-9)
    samples.clear()
    assert samples.means(0, None) is None


def test_timed_draw_counts_the_rest_as_pinning(clock: list[int]) -> None:
    iterator: Any = iter(DataLoader(Items(clock), batch_size=1))
    iterator._pin_memory = True

    def draw() -> Any:
        batch = iterator._dataset_fetcher.fetch([0])
        clock[0] += 3
        return batch

    samples = StageSamples(WorkerStacks())
    samples.timed(iterator, draw)
    means = samples.means(0, None)
    assert means is not None
    assert means.pin_seconds == 3e-9


def test_timed_draw_passes_an_exception_and_restores(clock: list[int]) -> None:
    def collate(items: list[int]) -> Any:
        raise LookupError("damaged")

    iterator: Any = iter(DataLoader(Items(clock), batch_size=2, collate_fn=collate))
    samples = StageSamples(WorkerStacks())
    with pytest.raises(LookupError, match="damaged"):
        samples.timed(iterator, iterator._next_data)
    assert iterator._dataset_fetcher.collate_fn is collate
    assert samples.means(0, None) is None


def test_timed_draw_of_another_iterator_is_untouched() -> None:
    assert StageSamples(WorkerStacks()).timed(object(), lambda: "a batch") == "a batch"


def test_workers_time_is_divided_by_their_stacks() -> None:
    workers = Workers(*["fetch"] * 5, *["collate"] * 2, "put", "get", "get")
    samples = StageSamples(workers)
    iterator = SimpleNamespace(_workers=[SimpleNamespace(pid=70), SimpleNamespace(pid=71)])
    for _ in range(10):
        samples.sample_workers(iterator)
    assert len(workers.asked) == 10
    assert set(workers.asked) <= {70, 71}
    assert samples.means(2, None) is None
    assert samples.means(2, 0.1) == InputStages(2, 10, 0.05, 0.02, 0.01, None, 0.2)


def test_workers_with_few_stacks_have_no_stages() -> None:
    samples = StageSamples(Workers("fetch"))
    samples.sample_workers(SimpleNamespace(_workers=[SimpleNamespace(pid=70)]))
    samples.sample_workers(SimpleNamespace(_workers=[]))
    assert samples.means(1, 0.1) is None


def test_pinning_thread_is_sampled() -> None:
    ready, release = threading.Event(), threading.Event()
    names = {"ready": ready, "release": release}
    source = "def pin_memory():\n    ready.set()\n    release.wait()\n"
    exec(compile(source, f"{TORCH}/pin_memory.py", "exec"), names)
    thread = threading.Thread(target=names["pin_memory"])  # type: ignore[arg-type]
    thread.start()
    ready.wait()
    samples = StageSamples(Workers(*["fetch"] * 8))
    iterator = SimpleNamespace(
        _workers=[SimpleNamespace(pid=70), SimpleNamespace(pid=71)], _pin_memory_thread=thread
    )
    for number in range(8):
        if number == 4:
            release.set()
            thread.join()
        samples.sample_workers(iterator)
    means = samples.means(2, 0.1)
    assert means is not None
    assert (means.fetch_seconds, means.pin_seconds) == (0.1, 0.5 * 0.1 / 2)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (InputStages(), ""),
        (InputStages(2, 10, 0.0, 0.0), ""),
        (InputStages(0, 7, 0.04, 0.02), "making a batch takes 60 ms: fetch 40 ms, collate 20 ms"),
        (InputStages(0, 7, 0.04, None, None, 0.01), "making a batch takes 50 ms: fetch 40 ms, pin 10 ms"),
        (
            InputStages(2, 10, 0.05, 0.02, 0.01, 0.005, 0.2),
            "making a batch takes a worker 80 ms: fetch 50 ms, collate 20 ms, send 10 ms, pin 5 ms;"
            " workers are idle 20% of the time",
        ),
    ],
)
def test_stages_in_words(stages: InputStages, words: str) -> None:
    assert stages.words == words
