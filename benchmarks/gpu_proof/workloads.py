"""What the checks train: a ResNet and a small GPT, written out here so that nothing needs to be installed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from benchmarks.gpu_proof.machine import Machine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

WARM_UP: Final = 3
"""Steps after a switch that are not timed."""


class Block(nn.Module):
    """A residual block: two convolutions of 3 x 3, or a bottleneck of 1 x 1, 3 x 3 and 1 x 1."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        sizes = [(1, 1), (3, stride), (1, 1)] if expansion > 1 else [(3, stride), (3, 1)]
        widths = [width] * (len(sizes) - 1) + [outputs]
        layers: list[nn.Module] = []
        channels = inputs
        for (kernel, step), wide in zip(sizes, widths, strict=True):
            layers += [
                nn.Conv2d(channels, wide, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(wide),
                nn.ReLU(inplace=True),
            ]
            channels = wide
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return as many images, of fewer pixels where the stride is 2."""
        result: Tensor = functional.relu(self.body(images) + self.shortcut(images))
        return result


class ResNet(nn.Module):
    """A residual network (He et al. 2015) for images of 32 x 32 or larger.

    Args:
        depths: Blocks of each of four stages.
        expansion: 1 for plain blocks, 4 for bottlenecks.
        classes: Size of the output.
        width: Channels of the first stage; doubled with each.
        is_small: Whether images are of 32 x 32: then the first layers do not shrink them.
    """

    def __init__(
        self, depths: tuple[int, ...], expansion: int, classes: int, width: int, *, is_small: bool
    ) -> None:
        super().__init__()
        first = nn.Conv2d(
            3, width, 3 if is_small else 7, 1 if is_small else 2, 1 if is_small else 3, bias=False
        )
        layers: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        if not is_small:
            layers.append(nn.MaxPool2d(3, 2, 1))
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                layers.append(Block(channels, width << stage, 2 if stage and not number else 1, expansion))
                channels = (width << stage) * expansion
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


class Attention(nn.Module):
    """A transformer's block with causal attention, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        split = self.projections(self.before(tokens)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = tokens + self.feed(self.after(tokens))
        return result


class GPT(nn.Module):
    """A small GPT with learned positions."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Attention(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return logits


@dataclass(slots=True)
class Workload:
    """A model and a batch for it, both on the device.

    Attributes:
        name: What to call it in a table.
        model: What is trained.
        inputs: One batch.
        targets: Its classes.
    """

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor


def resnet50(machine: Machine, batch: int = 128) -> Workload:
    """Return ResNet-50 on images of 224 x 224; a narrower input in a rehearsal."""
    size, batch = (32, 2) if machine.is_rehearsal else (224, batch)
    model = ResNet((3, 4, 6, 3), 4, 1000, machine.amount(64, 4), is_small=False).to(machine.device)
    images = torch.randn(batch, 3, size, size, device=machine.device)
    return Workload("ResNet-50", model, images, torch.randint(1000, (batch,), device=machine.device))


def gpt(machine: Machine, batch: int = 16) -> Workload:
    """Return a GPT of 12 layers of width 768 on 1,024 tokens; a tiny one in a rehearsal."""
    layers, width, length, words = (2, 32, 16, 64) if machine.is_rehearsal else (12, 768, 1024, 50304)
    batch = 2 if machine.is_rehearsal else batch
    model = GPT(layers, width, max(1, width // 64), length, words).to(machine.device)
    tokens = torch.randint(words, (batch, length), device=machine.device)
    return Workload("GPT", model, tokens, torch.randint(words, (batch, length), device=machine.device))


def resnet18(machine: Machine, batch: int = 128) -> Workload:
    """Return ResNet-18 on images of 32 x 32, whose many short kernels the host launches too slowly."""
    batch = 4 if machine.is_rehearsal else batch
    model = ResNet((2, 2, 2, 2), 1, 10, machine.amount(64, 4), is_small=True).to(machine.device)
    images = torch.randn(batch, 3, 32, 32, device=machine.device)
    return Workload("ResNet-18", model, images, torch.randint(10, (batch,), device=machine.device))


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """The same batch again and again; it is on the device already."""

    def __init__(self, workload: Workload, count: int) -> None:
        self.workload, self.count = workload, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return self.workload.inputs, self.workload.targets


class Training:
    """A loop over one batch that stays on the device, as a user writes it, in bfloat16 on a GPU.

    Args:
        workload: What to train.
        machine: Where.
        wrap: What the script does with the model first, such as ``torch.compile``.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        *,
        wrap: Callable[[nn.Module], Any] = lambda model: model,
    ) -> None:
        self.workload, self.machine = workload, machine
        self.model = wrap(workload.model)
        self.optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DataLoader(Repeated(self.workload, steps), batch_size=None))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one batch; the device may still be at it."""
        self.optimizer.zero_grad()
        with self.machine.autocast():
            logits = self.model(inputs)
            loss = self.loss(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        self.optimizer.step()
        result: Tensor = loss
        return result

    def run(self, steps: int) -> None:
        """Train for that many steps, and wait for the device."""
        for inputs, targets in self.batches(steps):
            self.step(inputs, targets)
        self.machine.wait()

    def timed(self, steps: int) -> tuple[float, float]:
        """Warm up and train; return a step's seconds by the wall clock and of this thread's CPU."""
        self.run(WARM_UP)
        wall, cpu = time.perf_counter(), time.thread_time()
        self.run(steps)
        return (time.perf_counter() - wall) / steps, (time.thread_time() - cpu) / steps
