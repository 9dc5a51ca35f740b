"""Samples of batches: what the loader's sampler chose counts, not the rows that collating makes of it."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import torchperfd

SAMPLES = 22
BATCH = 4


class Images(Dataset[dict[str, Any]]):
    """Images with three boxes each, as detectors have them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": torch.full((2,), index / 10),
            "boxes": torch.rand(3, 4),
            "classes": torch.zeros(3),
            "areas": torch.zeros(3),
            "name": f"{index}.jpg",
        }


def collate(images: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the boxes of all images into one tensor."""
    batch: dict[str, Any] = {key: [image[key] for image in images] for key in images[0]}
    batch["image"] = torch.stack(batch["image"])
    return batch | {key: torch.cat(batch[key]) for key in ("boxes", "classes", "areas")}


def pairs(images: list[dict[str, Any]]) -> torch.Tensor:
    """Two rows for each sample."""
    return torch.stack([image["image"] for image in images] * 2)


def train(batches: Any, *, steps: int | None = None) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in islice(batches, steps):
        optimizer.zero_grad()
        model(batch["image"] if isinstance(batch, dict) else batch).sum().backward()
        optimizer.step()


def samples(client: torchperfd.Client) -> int:
    client.finish()
    assert client.parts.instruments.faults.counts() == {}
    return client.report().totals.train.samples


@pytest.mark.parametrize("function", [collate, pairs])
def test_samples_are_the_samplers_not_the_rows(client: torchperfd.Client, function: Any) -> None:
    train(DataLoader(Images(), batch_size=BATCH, shuffle=True, collate_fn=function))
    assert samples(client) == SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"persistent_workers": True}], ids=str)
def test_samples_from_workers_are_the_samplers(client: torchperfd.Client, options: dict[str, bool]) -> None:
    lists = [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11, 12]]
    loader = DataLoader(Images(), batch_sampler=lists, collate_fn=collate, num_workers=2, **options)  # type: ignore[arg-type]
    for _ in range(2):
        train(loader)
    assert samples(client) == 2 * 13


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_samples_of_a_batch_sampler_of_ones_own(client: torchperfd.Client, kind: Any) -> None:
    lists = [kind([0, 1, 2]), kind([3]), kind([4, 5])]
    train(DataLoader(Images(), batch_sampler=lists, collate_fn=collate))
    assert samples(client) == 6


class Rows(Dataset[torch.Tensor]):
    """Gives a whole batch for a list of indices, twice the rows."""

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return torch.ones(2 * len(indices) if isinstance(indices, list) else 7, 2)

    def __len__(self) -> int:
        return SAMPLES


def test_samples_of_lists_without_collating(client: torchperfd.Client) -> None:
    sampler = BatchSampler(SequentialSampler(range(SAMPLES)), BATCH, drop_last=False)
    train(DataLoader(Rows(), batch_size=None, sampler=sampler))
    assert samples(client) == SAMPLES


def test_samples_of_whole_batches_by_key_are_rows(client: torchperfd.Client) -> None:
    train(DataLoader(Rows(), batch_size=None), steps=3)
    assert samples(client) == 21


class Repeating(DataLoader[Any]):
    """Never exhausts its one iterator, as ultralytics' loader does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", _Forever(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class _Forever:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from iter(self.sampler)


def test_samples_of_a_loader_that_repeats_are_exact(client: torchperfd.Client) -> None:
    loader = Repeating(Images(), batch_size=BATCH, collate_fn=collate)
    for _ in range(3):
        train(loader)
    assert samples(client) == 3 * SAMPLES


def test_samples_within_a_data_set_leave_the_outer_ones(client: torchperfd.Client) -> None:
    inner = iter(DataLoader(Images(), batch_size=1))

    class Outer(Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            next(inner)
            return super().__getitem__(index)

    train(DataLoader(Outer(), batch_size=BATCH, collate_fn=pairs))
    assert samples(client) == SAMPLES


def test_samples_of_an_iterable_data_set_are_rows(client: torchperfd.Client) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(SAMPLES, 2))

    train(DataLoader(Stream(), batch_size=BATCH))
    assert samples(client) == SAMPLES


def test_samples_of_a_wrapped_loader_are_the_samplers(client: torchperfd.Client) -> None:
    train(client.wrap(DataLoader(Images(), batch_size=BATCH, collate_fn=pairs)))
    assert samples(client) == SAMPLES


class Whole(Rows):
    """Gives a whole batch for each index, as data sets that read files of batches do."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __getitem__(self, _index: Any) -> Any:
        return torch.ones(self.rows, 2), torch.zeros(self.rows)

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(("rows", "each"), [(16, 16), (2, 1), (1, 1)])
def test_samples_of_a_data_set_that_gives_batches(client: torchperfd.Client, rows: int, each: int) -> None:
    """Two rows of one sample may be a pair."""
    train(row for row, _ in DataLoader(Whole(rows), batch_size=1, collate_fn=lambda items: items[0]))
    assert samples(client) == 6 * each


def test_samples_of_batches_of_one_are_one(client: torchperfd.Client) -> None:
    train(DataLoader(Images(), batch_size=1, collate_fn=collate))
    assert samples(client) == SAMPLES
