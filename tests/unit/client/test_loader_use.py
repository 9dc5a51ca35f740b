"""How a loader is used: sampled draws of a loader made up, and of torch's own."""

import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from torchperfd.hooks.loader_samples import SlowWorker, WorkerStarts, has_all_indices
from torchperfd.hooks.loader_use import LoaderSampler, describe_loader
from torchperfd.model.process import ANOMALY_DETECTION, ProcessSettings, available_cpus


class Iterator:
    """As torch's iterators are, with what a test has them make."""

    def __init__(self, batch: Any, workers: int = 0) -> None:
        self._num_workers = workers
        self._num_yielded = 1
        self.batch = batch

    def _next_data(self) -> Any:
        if isinstance(self.batch, BaseException):
            raise self.batch
        return self.batch


def sampler(*, training: bool = True, settings: ProcessSettings | None = None) -> LoaderSampler:
    made, settings = LoaderSampler(), settings or ProcessSettings()
    made.install(lambda: None, lambda: training, lambda _: (32, True, False), torch.Tensor, settings.read)
    return made


def test_loader_sampler_arms_once_for_each_flush() -> None:
    watched: list[int] = []
    made = LoaderSampler()
    made.arm()
    made.install(
        lambda: watched.append(1), lambda: True, lambda _: (0, False, False), torch.Tensor, lambda: None
    )
    made.arm()
    assert watched == [1]


def test_loader_sampler_draw_is_measured_once() -> None:
    made, iterator = sampler(), Iterator([torch.zeros(32, 64), torch.zeros(32, dtype=torch.int64)])
    assert made.use(1.0) is None
    assert made.at_draw(iterator, -1)
    assert iterator._next_data() is iterator.batch
    assert "_next_data" not in vars(iterator)
    assert not made.at_draw(iterator, -1)
    assert "_next_data" not in vars(iterator)
    use = made.use(2.0)
    assert use is not None
    assert (use.workers, use.batch_tensors, use.batch_bytes) == (0, 2, 32 * 64 * 4 + 32 * 8)
    assert (use.batch_size, use.indexable, use.shuffles, use.batches_per_step) == (32, True, False, 2.0)
    assert use.draw_cpu is not None
    assert use.rest_cpus is not None
    assert use.queued is not None
    assert 0 <= use.queued < 1
    assert use.cpus == available_cpus()


@pytest.mark.parametrize("raised", [StopIteration(), TimeoutError("a handler's"), KeyboardInterrupt()])
def test_loader_sampler_exception_passes_unchanged(raised: BaseException) -> None:
    made, iterator = sampler(), Iterator(raised)
    made.arm()
    made.at_draw(iterator, -1)
    with pytest.raises(type(raised)) as caught:
        iterator._next_data()
    assert caught.value is raised
    assert "_next_data" not in vars(iterator)


def test_loader_sampler_validation_and_first_draws_wait() -> None:
    iterator = Iterator(torch.zeros(4))
    validating = sampler(training=False)
    validating.arm()
    assert validating.at_draw(iterator, -1)
    training, fresh = sampler(), Iterator(torch.zeros(4))
    fresh._num_yielded = 0
    training.arm()
    assert training.at_draw(fresh, -1)
    for each in (iterator, fresh):
        assert "_next_data" not in vars(each)


def test_loader_sampler_waiting_is_no_cpu_time() -> None:
    class Waits(Iterator):
        def _next_data(self) -> Any:
            time.sleep(0.02)
            return self.batch

    class Computes(Iterator):
        def _next_data(self) -> Any:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            return self.batch

    shares = []
    for kind in (Waits, Computes):
        made, iterator = sampler(), kind(torch.zeros(4))
        made.arm()
        made.at_draw(iterator, -1)
        iterator._next_data()
        use = made.use(1.0)
        assert use is not None
        assert use.draw_cpu is not None
        shares.append(use.draw_cpu)
    assert shares[0] < 0.5 < shares[1]


def test_loader_sampler_strange_batches_count_nothing() -> None:
    nested: list[Any] = []
    nested.append(nested)
    for batch in (None, "text", object(), nested, {"x": [1, 2]}):
        made, iterator = sampler(), Iterator(batch)
        made.arm()
        made.at_draw(iterator, -1)
        iterator._next_data()
        use = made.use(1.0)
        assert use is not None
        assert (use.batch_tensors, use.batch_bytes) == (0, 0)


def test_loader_sampler_threads_are_of_the_newest_sample() -> None:
    settings = ProcessSettings()
    settings.install(torch.get_num_threads, {ANOMALY_DETECTION: torch.is_anomaly_enabled})
    made, iterator = sampler(settings=settings), Iterator(torch.zeros(4))
    own, found = torch.get_num_threads(), [settings.threads]
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            made.arm()
            made.at_draw(iterator, -1)
            iterator._next_data()
            found.append(settings.threads)
    finally:
        torch.set_num_threads(own)
    assert found == [None, 2, 3]


def test_loader_sampler_workers_are_followed() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(400, 4)), batch_size=2, num_workers=1)
    iterator = iter(loader)
    made = sampler()
    next(iterator)
    made.arm()
    made.at_draw(iterator, 1)
    next(iterator)
    first = made.use(1.0)
    for _ in range(50):
        next(iterator)
    use = made.use(1.0)
    assert first is not None
    assert use is not None
    assert use.workers == 1
    assert use.receive_seconds is not None
    assert first.worker_cpu_seconds is None
    if Path("/proc/self/schedstat").exists():
        assert use.worker_cpu_seconds is not None
        assert 0 < use.worker_cpu_seconds < 1


def test_describe_indexable_is_a_plain_tensor_dataset() -> None:
    data = TensorDataset(torch.zeros(8, 2), torch.zeros(8))

    class Own(TensorDataset):
        pass

    def described(dataset: Any = data, **options: Any) -> tuple[int, bool, bool]:
        return describe_loader(iter(DataLoader(dataset, **options)))

    assert described(batch_size=4) == (4, True, False)
    assert described(batch_size=4, shuffle=True) == (4, True, True)
    assert described(batch_size=None) == (0, False, False)
    assert described(batch_size=4, collate_fn=list)[1] is False
    assert described(Own(torch.zeros(8)), batch_size=4)[1] is False
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    assert described(batch_size=4, sampler=weighted) == (4, False, False)


@pytest.mark.parametrize("shuffle", [False, True])
def test_whole_batches_give_the_same_batches(shuffle: bool) -> None:
    """What is advised for a ``TensorDataset`` gives training the very same batches."""
    data = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))
    torch.manual_seed(1)
    usual = list(DataLoader(data, batch_size=8, shuffle=shuffle))
    torch.manual_seed(1)
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    whole = list(DataLoader(data, batch_size=None, sampler=BatchSampler(order, 8, drop_last=False)))
    for one, other in zip(usual, whole, strict=True):
        assert type(one) is type(other)
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right)


def cgroup(tmp_path: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    proc.write_text(lines)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root, proc


def test_available_cpus_quota_of_any_group_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    files = {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    assert available_cpus(*cgroup(tmp_path, "0::/a/b\n", files)) == 1.5
    assert available_cpus(tmp_path / "none", tmp_path / "nothing") == 8.0


def test_available_cpus_first_version_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    files = {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}
    files |= {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert available_cpus(*cgroup(tmp_path, "4:memory:/a\n1:cpu,cpuacct:/a\n", files)) == 2.0


def test_available_cpus_are_shared_with_the_nodes_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nowhere = tmp_path / "none"
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert available_cpus(nowhere, nowhere) == 2.0
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert available_cpus(nowhere, nowhere) == 8.0


def test_starts_of_workers_are_timed_without_the_first() -> None:
    starts = WorkerStarts(lambda: True)
    for _ in range(3):
        iterator = Iterator("batch", workers=2)
        starts.begun(iterator, time.perf_counter_ns() - 2_000_000_000)
        assert iterator._next_data() == "batch"
        assert "_next_data" not in vars(iterator)
        seconds = starts.seconds
        assert seconds is None or 2 <= seconds < 60
        assert (seconds is None) == (starts.count == 1)
    assert starts.count == 3


def test_starts_leave_validation_and_exceptions_alone() -> None:
    iterator = Iterator(StopIteration(), workers=2)
    WorkerStarts(lambda: False).begun(iterator, 0)
    assert "_next_data" not in vars(iterator)
    starts = WorkerStarts(lambda: True)
    starts.begun(iterator, 0)
    with pytest.raises(StopIteration):
        iterator._next_data()
    assert (starts.count, starts.seconds) == (1, None)


@pytest.mark.parametrize(
    ("awaited", "number"),
    [([3] * 6, 3), ([3] * 5, None), ([3] * 9 + [1, 2, 0], 3), ([0, 1, 2, 3] * 4, None)],
)
def test_slow_worker_is_the_one_that_is_awaited(awaited: list[int], number: int | None) -> None:
    slow = SlowWorker()
    for worker in awaited:
        tasks = {7: (worker,), 8: ((worker + 1) % 4, "batch"), 11: (worker,)}
        slow.observe(SimpleNamespace(_task_info=tasks, _rcvd_idx=7, _num_workers=4))
    # Another worker is at work as well, or nothing of the others is there.
    quiet: list[dict[int, tuple[int, ...] | tuple[int, str]]] = [
        {7: (1,), 8: (2,)},
        {7: (1,), 8: (2, "batch"), 9: (0,)},
        {7: (1,)},
        {8: (1,), 9: (2, "batch")},
    ]
    for others in quiet:
        for _ in range(9):
            slow.observe(SimpleNamespace(_task_info=others, _rcvd_idx=7, _num_workers=4))
    slow.observe(SimpleNamespace())
    assert slow.number == number
    slow.clear()
    assert slow.number is None


def test_one_of_two_equal_workers_does_not_stand_out_by_chance() -> None:
    slow = SlowWorker()
    for worker in [0] * 7 + [1]:
        tasks = {7: (worker,), 8: (1 - worker, "batch")}
        slow.observe(SimpleNamespace(_task_info=tasks, _rcvd_idx=7, _num_workers=2))
    assert slow.number is None


class Slowed(Dataset[int]):
    """Items of which one worker's take longer."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        time.sleep(0.03 if info is not None and info.id == 1 else 0.001)
        return index


class SlowedStream(IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Generator[int]:
        yield from (Slowed()[index] for index in range(1000))


@pytest.mark.parametrize("dataset", [Slowed(), SlowedStream()], ids=["items", "stream"])
def test_slow_worker_of_a_real_loader_is_found(dataset: Dataset[int]) -> None:
    slow, has_ended = SlowWorker(), threading.Event()
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=2))

    def observe() -> None:
        while not has_ended.wait(0.01):
            slow.observe(batches)

    watching = threading.Thread(target=observe)
    watching.start()
    try:
        for _ in range(40):
            next(batches)
    finally:
        has_ended.set()
        watching.join()
    assert slow.number == 1


class Equal(Dataset[int]):
    """Items that take each worker equally long."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.004)
        return index


@pytest.mark.parametrize(
    ("dataset", "number"),
    [(Slowed(), 1), (SlowedStream(), 1), (Equal(), None)],
    ids=["items", "stream", "equal"],
)
def test_slow_worker_shows_from_one_draw_to_the_next(dataset: Dataset[int], number: int | None) -> None:
    slow = SlowWorker()
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=2))
    next(batches)
    for _ in range(30):
        slow.at_draw(batches)
        next(batches)
    assert slow.number == number


@pytest.mark.parametrize(("outstanding", "has_all"), [(4, False), (3, False), (2, True), (0, True)])
def test_last_batches_of_an_iterator_are_recognised(outstanding: int, has_all: bool) -> None:
    iterator = SimpleNamespace(_tasks_outstanding=outstanding, _num_workers=2, _prefetch_factor=2)
    assert has_all_indices(iterator) == has_all
    assert not has_all_indices(SimpleNamespace(_num_workers=2))
