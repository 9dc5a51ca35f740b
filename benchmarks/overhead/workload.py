"""The training that everybody does: a small MLP on a DataLoader, on one CPU thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

WARM_STEPS: Final = 2
_BATCH: Final = 64
_FEATURES: Final = 64
WIDTH: Final = 192
_CLASSES: Final = 10

Span = Callable[[str], AbstractContextManager[Any]]
ACTIONS: Final = ("step", "data", "zero_grad", "forward", "loss", "backward", "optimizer")
"""What everybody times. All but ``step`` are phases of torchperfd by the same name."""


def now() -> tuple[int, int]:
    """Return this thread's CPU time and the monotonic clock, in nanoseconds."""
    return time.thread_time_ns(), time.perf_counter_ns()


class Workload:
    """One model, its data and its optimizer; the same in every process.

    Args:
        steps: How many batches there are.
        width: Of the hidden layers.
        replicated: Whether the model is in ``DistributedDataParallel``, on gloo, of this one rank: it has
            all of a rank's own work, without another rank to wait for.

    Attributes:
        replicated: As given.
        loader: The batches of one block.
        warm_loader: The few batches that are trained on ahead of every block, untimed.
        ends: When each step ended, by the thread's CPU clock and by the monotonic one; every
            loop appends to it.
    """

    def __init__(self, steps: int, *, width: int = WIDTH, replicated: bool = False) -> None:
        self.replicated = replicated
        torch.set_num_threads(1)
        torch.manual_seed(0)
        features = torch.randn(steps * _BATCH, _FEATURES)
        data = TensorDataset(features, torch.randint(0, _CLASSES, (len(features),)))
        warm = TensorDataset(*data[: WARM_STEPS * _BATCH])
        self.loader = DataLoader(data, batch_size=_BATCH)
        self.warm_loader = DataLoader(warm, batch_size=_BATCH)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(_FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, _CLASSES),
        )
        if replicated:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            self.model = DistributedDataParallel(self.model)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.ends: list[tuple[int, int]] = []

    def plain(self, loader: DataLoader[Any]) -> None:
        """Train as a script does that knows of no profiler."""
        for _ in self.steps(loader):
            self.ends.append(now())

    def steps(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Train in the same way, a step for each that is asked for."""
        for inputs, targets in loader:
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = self.loss(outputs, targets)
            loss.backward()
            self.optimizer.step()
            yield

    def in_steps(
        self, loader: DataLoader[Any], step: Callable[[nn.Module], AbstractContextManager[Any]]
    ) -> None:
        """Train with everything between two draws in a context."""
        for inputs, targets in loader:
            with step(self.model):
                self.optimizer.zero_grad()
                outputs = self.model(inputs)
                loss = self.loss(outputs, targets)
                loss.backward()
                self.optimizer.step()
            self.ends.append(now())

    def in_spans(self, loader: DataLoader[Any], span: Span) -> None:
        """Train with each of ``ACTIONS`` in a context."""
        batches = iter(loader)
        for _ in range(len(loader)):
            with span("step"):
                with span("data"):
                    inputs, targets = next(batches)
                with span("zero_grad"):
                    self.optimizer.zero_grad()
                with span("forward"):
                    outputs = self.model(inputs)
                with span("loss"):
                    loss = self.loss(outputs, targets)
                with span("backward"):
                    loss.backward()
                with span("optimizer"):
                    self.optimizer.step()
            self.ends.append(now())

    def in_events(self, loader: DataLoader[Any], event: Callable[[str], None]) -> None:
        """Train with an event before and after each of ``ACTIONS``."""
        batches = iter(loader)
        for _ in range(len(loader)):
            event("before_step")
            event("before_data")
            inputs, targets = next(batches)
            event("after_data")
            event("before_zero_grad")
            self.optimizer.zero_grad()
            event("after_zero_grad")
            event("before_forward")
            outputs = self.model(inputs)
            event("after_forward")
            event("before_loss")
            loss = self.loss(outputs, targets)
            event("after_loss")
            event("before_backward")
            loss.backward()
            event("after_backward")
            event("before_optimizer")
            self.optimizer.step()
            event("after_optimizer")
            event("after_step")
            self.ends.append(now())
