"""What slow loops are made of: datasets, models, and the step that trains."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import GPT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], None]


class Photos(Dataset[tuple[Tensor, int]]):
    """Images that are cropped, flipped and normalised in NumPy, which takes CPU time."""

    _MEAN: Final = np.array([0.485, 0.456, 0.406])

    def __init__(self, side: int) -> None:
        self._side = side
        self._images = np.random.default_rng(0).integers(0, 256, (256, side + 8, side + 8, 3), np.uint8)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        left = index % 8
        image = self._images[index % len(self._images), left : left + self._side, left : left + self._side]
        image = (image[:, :: 1 - 2 * (index & 1)] / 255.0 - self._MEAN) / 0.225
        return torch.from_numpy(image).permute(2, 0, 1).float(), index % 10


class ReadyBatches(Dataset[Tensor]):
    """The same batch again and again, which costs a worker nothing but to send."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return self._batch


class Reshaped(nn.Module):
    """A layer whose many views cost the host more time than its kernels cost the device."""

    _VIEWS: Final = 30

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of the same shape."""
        for _ in range(self._VIEWS):
            inputs = inputs.view(len(inputs), 16, -1).flatten(1)
        return functional.relu(self.linear(inputs))


def endless(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Return the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


def worker_options(machine: Machine, count: int) -> dict[str, Any]:
    """Return the arguments of a loader with workers; of one without in a rehearsal, which is to be short."""
    return {} if machine.is_rehearsal else {"num_workers": count, "persistent_workers": True}


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers between these widths, each followed by a ReLU."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(*pair, bias=False), nn.ReLU()) for pair in pairs])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def gpt_loss(machine: Machine, *, is_bf16: bool = True) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a GPT of six layers, and a function that computes its loss on a batch that stays the same."""
    layers, width, length, words = (1, 32, 16, 64) if machine.is_rehearsal else (6, 768, 1024, 8192)
    model = GPT(layers, width, max(1, width // 64), length, words).to(machine.device)
    tokens, targets = torch.randint(words, (2, machine.amount(8, 2), length), device=machine.device)

    def loss() -> Tensor:
        with machine.autocast() if is_bf16 else nullcontext():
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return model, loss


def mean_square(outputs: Tensor) -> Tensor:
    """Return the mean square, as a loss in at least single precision."""
    return (outputs.float() if outputs.dtype is torch.bfloat16 else outputs).square().mean()


def train(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], *, to_none: bool = True) -> Step:
    """Return a training step.

    Args:
        loss: Draws a batch and goes forward.
        to_none: Whether the old gradients are dropped, or filled with zeros.
    """

    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        torch.autograd.backward(loss())
        optimizer.step()

    return step
