"""Three loaders with different bottlenecks, and one with the rest of a training step."""

import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

_IMAGES = 512
_SIDE = 64
_SENTENCES = 4096
_LONGEST = 400


class CompressedImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that each item decodes: the decoder has most of the time."""

    def __init__(self) -> None:
        chance = random.Random(0)
        rows = [bytes(chance.randrange(256) for _ in range(16)) * (_SIDE * 3 // 16) for _ in range(_SIDE)]
        self._images = []
        for _ in range(_IMAGES):
            chance.shuffle(rows)
            self._images.append(zlib.compress(b"".join(rows), 9))

    def __len__(self) -> int:
        return _IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # As often as makes a millisecond of it, like an image of a camera's size.
        for _ in range(12):
            pixels = zlib.decompress(self._images[index])
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return image.reshape(3, _SIDE, _SIDE).float().div(255), index % 10


class Sentences(Dataset[list[int]]):
    """Sentences of different lengths, which are cheap until they are put together."""

    def __init__(self) -> None:
        chance = random.Random(0)
        self._sentences = [
            [chance.randrange(30_000) for _ in range(chance.randrange(10, _LONGEST))]
            for _ in range(_SENTENCES)
        ]

    def __len__(self) -> int:
        return _SENTENCES

    def __getitem__(self, index: int) -> list[int]:
        return self._sentences[index]


def padded(sentences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put sentences together: pad them, and mask what was padded."""
    longest = max(len(each) for each in sentences)
    tokens = torch.tensor([[*each, *[0] * (longest - len(each))] for each in sentences])
    return tokens, tokens != 0


def decode_bound() -> DataLoader[Any]:
    """Each item is decoded."""
    return DataLoader(CompressedImages(), batch_size=32, shuffle=True)


def collate_bound() -> DataLoader[Any]:
    """Each batch is padded."""
    return DataLoader(Sentences(), batch_size=64, shuffle=True, collate_fn=padded)


def tiny_items() -> DataLoader[Any]:
    """Each item is a row of a tensor, cheaper than to hand it over."""
    data = TensorDataset(torch.randn(20_000, 8), torch.randint(0, 10, (20_000,)))
    return DataLoader(data, batch_size=64, shuffle=True)


def decode_bound_training() -> tuple[DataLoader[Any], Callable[[Any], None]]:
    """The first loader with the rest of a training step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, _SIDE, _SIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()

    def step(batch: Any) -> None:
        images, labels = batch
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return decode_bound(), step
