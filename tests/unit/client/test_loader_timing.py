"""Measuring a DataLoader: the copy under another setting, and what is counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from torchperfd.errors import TorchperfdError
from torchperfd_cli.bench.in_process import measure_ceiling, predict_ceiling
from torchperfd_cli.bench.loader_process import LoaderSetting
from torchperfd_cli.bench.loader_timing import loader_description, measure_loader, with_setting


def dataset(items: int = 40) -> TensorDataset:
    return TensorDataset(torch.arange(items, dtype=torch.float32).reshape(items, 1), torch.zeros(items))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(3)


class OwnLoader(DataLoader[Any]):
    """A script's own class, which cannot be made from a DataLoader's arguments."""

    def __init__(self, name: str, source: "Dataset[Any]") -> None:
        super().__init__(source, batch_size=4, drop_last=True)
        self.name = name

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [part + 1 for part in batch]


def drawn(loader: "DataLoader[Any]", count: int) -> list[Any]:
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def test_facts_are_the_loaders_own_arguments() -> None:
    found = loader_description(
        DataLoader(dataset(), batch_size=8, num_workers=2, prefetch_factor=4), has_step=True
    )
    assert found.current == LoaderSetting(2, 8, 4, start_method="")
    assert found.can_batch
    assert found.has_step
    assert found.cpus >= 1


def test_facts_name_a_start_method_that_the_script_chose() -> None:
    loader = DataLoader(dataset(), num_workers=1, multiprocessing_context="spawn")
    assert loader_description(loader, has_step=False).current.start_method == "spawn"


def test_another_setting_leaves_the_loader_as_it_was() -> None:
    loader = DataLoader(dataset(), batch_size=8)
    changed = with_setting(loader, LoaderSetting(1, 16, 4, start_method="fork"))
    assert (loader.num_workers, loader.batch_size, loader.prefetch_factor) == (0, 8, None)
    assert (changed.num_workers, changed.batch_size, changed.prefetch_factor) == (1, 16, 4)
    assert changed.multiprocessing_context.get_start_method() == "fork"
    assert len(loader) == 5
    assert [len(batch[0]) for batch in loader] == [8] * 5


def test_small_dataset_is_drawn_from_again_and_again() -> None:
    batches = drawn(with_setting(DataLoader(dataset(10), batch_size=4), LoaderSetting(0, 4)), 7)
    assert [batch[0].flatten().tolist() for batch in batches[:4]] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [0, 1, 2, 3],
    ]


def test_class_of_the_scripts_own_is_kept() -> None:
    loader = OwnLoader("mine", dataset(10))
    changed = with_setting(loader, LoaderSetting(0, 2))
    assert isinstance(changed, OwnLoader)
    assert changed.name == "mine"
    assert drawn(changed, 1)[0][0].flatten().tolist() == [1, 2]


def test_batch_sampler_of_the_scripts_own_is_kept() -> None:
    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 3], [1, 2])

    loader = DataLoader(dataset(), batch_sampler=Pairs(SequentialSampler(range(4)), 2, drop_last=False))
    found = loader_description(loader, has_step=False)
    assert not found.can_batch
    batches = drawn(with_setting(loader, found.current), 3)
    assert [batch[0].flatten().tolist() for batch in batches] == [[0, 3], [1, 2], [0, 3]]


def test_loader_without_batches_is_drawn_from_again() -> None:
    loader = DataLoader(dataset(3), batch_size=None)
    found = loader_description(loader, has_step=False)
    assert found.current == LoaderSetting(0, None)
    items = drawn(with_setting(loader, found.current), 4)
    assert [float(item[0]) for item in items] == [0, 1, 2, 0]


def test_distributed_sampler_begins_a_new_epoch() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset(20), num_replicas=2, rank=0)
    loader = DataLoader(dataset(20), batch_size=10, sampler=sampler)
    first, second = drawn(with_setting(loader, LoaderSetting(0, 10)), 2)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_measurement_counts_batches_and_ends_its_workers(workers: int) -> None:
    setting = LoaderSetting(workers, 4, 2 if workers else 0)
    found = measure_loader(DataLoader(dataset(), batch_size=4), setting, 0.05)
    assert found.batches >= 5
    assert found.batches % max(1, workers) == 0
    assert found.batch_bytes == 4 * 4 * 2
    assert found.samples_per_second == pytest.approx(4 / found.batch_seconds, rel=1e-6)
    assert 0 < found.wait_seconds <= found.batch_seconds


def test_endless_dataset_is_measured_for_the_time_given() -> None:
    found = measure_loader(DataLoader(Endless(), batch_size=2), LoaderSetting(0, 2), 0.05)
    assert found.samples_per_second == pytest.approx(2 / found.batch_seconds, rel=1e-6)


def test_short_iterable_dataset_is_begun_again() -> None:
    class Three(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.ones(3, 2)

    assert measure_loader(DataLoader(Three(), batch_size=2), LoaderSetting(0, 2), 0.02).batches >= 5


def test_loader_without_items_is_an_error() -> None:
    with pytest.raises(TorchperfdError, match="has no batch"):
        measure_loader(DataLoader(dataset(0), batch_size=4), LoaderSetting(0, 4), 0.05)


def test_step_gets_every_batch_and_is_no_wait() -> None:
    seen: list[int] = []
    loader = DataLoader(dataset(), batch_size=4)
    found = measure_loader(loader, LoaderSetting(0, 4), 0.05, lambda batch: seen.append(len(batch[0])))
    assert len(seen) == found.batches + 1  # the first one is no part of the measurement
    assert set(seen) == {4}


def test_ceiling_uses_batches_that_are_in_memory() -> None:
    drawn_items: list[int] = []

    class Counted(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            drawn_items.append(index)
            return torch.zeros(2)

    steps: list[Any] = []
    loader = DataLoader(Counted(), batch_size=2)
    found = measure_ceiling(loader, LoaderSetting(2, 2, 2), 0.02, steps.append)
    assert found.seconds > 0
    assert found.predicted_seconds is not None
    assert found.predicted_seconds > 0
    # One to warm up, the eight that are kept and four new ones, again and again; four more are only made.
    rounds = len(steps) // 13
    assert len(steps) == 13 * rounds
    assert len(drawn_items) == 2 * (8 + 8 * rounds)
    assert all(one is other for one, other in zip(steps[:9], steps[13:22], strict=True))


def test_ceiling_predicted_is_a_part_of_the_rest() -> None:
    loader = DataLoader(dataset(), batch_size=4)
    for rest in (1e-9, 0.004, 10.0):
        found = predict_ceiling(loader, LoaderSetting(0, 4), 0.01, rest)
        assert rest / 4 <= found.seconds <= rest


def test_threads_of_a_setting_end_with_its_measurement() -> None:
    own = torch.get_num_threads()
    seen: list[int] = []
    loader = DataLoader(dataset(), batch_size=4)
    step = lambda _: seen.append(torch.get_num_threads())  # noqa: E731
    measure_loader(loader, LoaderSetting(0, 4, threads=own + 1), 0.01, step)
    assert set(seen) == {own + 1}
    assert torch.get_num_threads() == own


@pytest.mark.parametrize("has_step", [False, True])
def test_measurement_without_workers_has_the_rules_facts(has_step: bool) -> None:
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    step = (lambda _: None) if has_step else None
    facts = measure_loader(loader, LoaderSetting(0, 4), 0.05, step).loader
    assert facts is not None
    assert facts.is_sound()
    assert (facts.workers, facts.batch_tensors, facts.batch_bytes, facts.batch_size) == (0, 2, 32, 4)
    assert (facts.indexable, facts.shuffles, facts.batches_per_step) == (True, True, 1.0)
    assert facts.draw_cpu is not None
    assert 0 <= facts.draw_cpu <= 1
    assert (facts.rest_cpus is not None) is has_step
    assert measure_loader(loader, LoaderSetting(1, 4, 2), 0.02).loader is None
