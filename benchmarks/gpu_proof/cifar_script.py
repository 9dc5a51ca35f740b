"""A script that trains ResNet-18 on images like CIFAR-10's, as in tutorials on torch's profiler.

Its images are indexed and transformed one by one, in the training process unless there are workers.
"""

import random
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from benchmarks.gpu_proof.loop_parts import endless
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import ResNet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_PADDING: Final = 4


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the script is set up.

    Attributes:
        name: What to call it in the table.
        is_bf16: Whether under autocast to bfloat16, with images and weights in channels_last.
    """

    name: str
    workers: int = 0
    batch: int = 32
    is_bf16: bool = False


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images of 32 x 32, cropped and flipped at random, as NumPy arrays up to the end."""

    def __init__(self, count: int) -> None:
        chance = np.random.default_rng(0)
        self._images = chance.integers(0, 256, (count, 32, 32, 3), np.uint8)
        self._labels = chance.integers(0, 10, count)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = np.pad(self._images[index], ((_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0)), "reflect")
        top, left = random.randint(0, 2 * _PADDING), random.randint(0, 2 * _PADDING)
        image = image[top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image[:, ::-1]
        return torch.from_numpy(image / 255.0).permute(2, 0, 1).float(), torch.tensor(self._labels[index])


class Script:
    """The training script in one configuration.

    Attributes:
        model: What it trains.
        progress: The text of its progress bar.
    """

    def __init__(self, machine: Machine, configuration: Configuration, images: Images) -> None:
        self._machine, self._configuration = machine, configuration
        self.model = ResNet((2, 2, 2, 2), 1, 10, machine.amount(64, 4), is_small=True).to(machine.device)
        self._format = torch.channels_last if configuration.is_bf16 else torch.contiguous_format
        # Of nn.Module.to, torch's type hints leave this argument out.
        self.model.to(memory_format=self._format)  # type: ignore[call-overload]
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._loss = nn.CrossEntropyLoss()
        self._is_pinned = configuration.workers > 0 and not machine.is_rehearsal
        # Not a method: a cycle would leave the workers to the collector, which makes each take 5 s to end.
        self._batches = endless(
            DataLoader(
                images,
                batch_size=configuration.batch,
                shuffle=True,
                drop_last=True,
                num_workers=configuration.workers,
                persistent_workers=configuration.workers > 0,
                pin_memory=self._is_pinned,
            )
        )
        self.progress = ""

    def step(self) -> None:
        """Train on one batch, and read its loss and accuracy for a progress bar."""
        images, labels = (
            each.to(self._machine.device, non_blocking=self._is_pinned) for each in next(self._batches)
        )
        images = images.contiguous(memory_format=self._format)
        self._optimizer.zero_grad()
        with torch.autocast(self._machine.device, torch.bfloat16, enabled=self._configuration.is_bf16):
            logits = self.model(images)
            loss = self._loss(logits, labels)
        accuracy = (logits.argmax(1) == labels).sum().item() / len(labels)
        loss.backward()
        self._optimizer.step()
        self.progress = f"loss {loss.item():.4f} acc {accuracy:.4f}"
