"""Slow training loops for the rules that one GPU can show, each also with the advice applied.

In each loop one thing is wrong, so that its rule should come first. Sizes are of a fast GPU; a rehearsal has
tiny ones.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import GPT, ResNet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class SlowLoop:
    """A slow loop and the change that its advice asks for.

    Attributes:
        rule: The rule that must find it.
        build: Returns a step of the loop, before (False) or after (True) the advice is applied.
        detail: Distinguishes loops of one rule.
        profile_memory: Whether the rule needs allocations in the trace.
        batches: Batches of the slow loop that one step trains on after the change.
    """

    rule: str
    build: Callable[[Machine, bool], Step]
    detail: str = ""
    profile_memory: bool = False
    batches: int = 1

    @property
    def name(self) -> str:
        """The rule, and the detail if there is one."""
        return f"{self.rule} ({self.detail})" if self.detail else self.rule


class _Photos(Dataset[tuple[Tensor, int]]):
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


class _ReadyBatches(Dataset[Tensor]):
    """The same batch again and again, which costs a worker nothing but to send."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return self._batch


class _Reshaped(nn.Module):
    """A layer whose many views cost the host more time than its kernels cost the device."""

    _VIEWS: Final = 30

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(self._VIEWS):
            inputs = inputs.view(len(inputs), 16, -1).flatten(1)
        return functional.relu(self.linear(inputs))


def _endless(loader: "DataLoader[Any]") -> Iterator[Any]:
    while True:
        yield from loader


def _workers(machine: Machine, count: int) -> dict[str, Any]:
    """Return the arguments of a loader with workers; of one without in a rehearsal, which is to be short."""
    return {} if machine.is_rehearsal else {"num_workers": count, "persistent_workers": True}


def _bf16(machine: Machine) -> torch.autocast:
    """Return autocast to bfloat16; off in a rehearsal, since many CPUs convolve it a hundred times slower."""
    return torch.autocast(machine.device, torch.bfloat16, enabled=not machine.is_rehearsal)


def _mlp(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[nn.Sequential(nn.Linear(*pair, bias=False), nn.ReLU()) for pair in pairs])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _gpt_loss(machine: Machine, *, is_bf16: bool = True) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a GPT of six layers, and a function that computes its loss on a batch that stays the same."""
    layers, width, length, words = (1, 32, 16, 64) if machine.is_rehearsal else (6, 768, 1024, 8192)
    model = GPT(layers, width, max(1, width // 64), length, words).to(machine.device)
    tokens, targets = torch.randint(words, (2, machine.amount(8, 2), length), device=machine.device)

    def loss() -> Tensor:
        with _bf16(machine) if is_bf16 else nullcontext():
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return model, loss


def _square(outputs: Tensor) -> Tensor:
    """Return the mean square, as a loss in at least single precision."""
    return (outputs.float() if outputs.dtype is torch.bfloat16 else outputs).square().mean()


def _train(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], *, to_none: bool = True) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        torch.autograd.backward(loss())
        optimizer.step()

    return step


def loader_workers(machine: Machine, tuned: bool) -> Step:
    """Transform images in the training process, or in workers that pin what they make."""
    side, is_pinned = machine.amount(96, 16), tuned and not machine.is_rehearsal
    options = _workers(machine, 8) if tuned else {}
    batches = _endless(
        DataLoader(_Photos(side), machine.amount(64, 4), pin_memory=is_pinned, shuffle=True, **options)
    )
    model = _mlp(3 * side * side, machine.amount(2048, 16), 16).to(machine.device)

    def loss() -> Tensor:
        images, labels = (each.to(machine.device, non_blocking=is_pinned) for each in next(batches))
        with _bf16(machine):
            return functional.cross_entropy(model(images.flatten(1)), labels)

    return _train(_sgd(model), loss)


def whole_batches(machine: Machine, tuned: bool) -> Step:
    """Index a dataset of tensors item by item, or batch by batch."""
    count, batch = machine.amount(65_536, 256), machine.amount(512, 64)
    data = TensorDataset(torch.randn(count, 256), torch.randint(16, (count,)))
    order = BatchSampler(RandomSampler(data), batch, drop_last=False)
    options: dict[str, Any] = (
        {"batch_size": None, "sampler": order} if tuned else {"batch_size": batch, "shuffle": True}
    )
    batches = _endless(DataLoader(data, **options))
    model = _mlp(256, *[machine.amount(2048, 32)] * 3, 16).to(machine.device)

    def loss() -> Tensor:
        inputs, labels = (each.to(machine.device) for each in next(batches))
        with _bf16(machine):
            return functional.cross_entropy(model(inputs), labels)

    return _train(_sgd(model), loss)


def pin_memory(machine: Machine, tuned: bool) -> Step:
    """Copy batches of images from pageable memory, or from memory that a thread of the loader has pinned."""
    side, is_pinned = machine.amount(224, 16), tuned and not machine.is_rehearsal
    images = torch.randn(machine.amount(128, 2), 3, side, side)
    options = _workers(machine, 4)
    batches = _endless(DataLoader(_ReadyBatches(images), batch_size=None, pin_memory=is_pinned, **options))
    model = ResNet((2, 2, 2, 2), 1, 10, is_small=False).to(machine.device)

    def loss() -> Tensor:
        inputs = next(batches).to(machine.device, non_blocking=is_pinned)
        with _bf16(machine):
            return _square(model(inputs))

    return _train(_sgd(model), loss)


def fused_optimizer(machine: Machine, tuned: bool) -> Step:
    """Update parameter by parameter, or all in one kernel."""
    model, loss = _gpt_loss(machine)
    parameters = model.parameters()
    optimizer = (
        torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        if tuned
        else torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
    )
    return _train(optimizer, loss)


def zero_grad(machine: Machine, tuned: bool) -> Step:
    """Fill large gradients with zeros and add to them, or drop them."""
    width = machine.amount(8192, 64)
    model, inputs = _mlp(*[width] * 7).to(machine.device), torch.randn(256, width, device=machine.device)

    def loss() -> Tensor:
        with _bf16(machine):
            return _square(model(inputs))

    return _train(_sgd(model), loss, to_none=tuned)


def float64(machine: Machine, tuned: bool) -> Step:
    """Train in double precision, or in single."""
    width, dtype = machine.amount(4096, 64), torch.float32 if tuned else torch.float64
    model = _mlp(*[width] * 5).to(machine.device, dtype)
    inputs = torch.randn(machine.amount(2048, 32), width, device=machine.device, dtype=dtype)
    return _train(_sgd(model), lambda: _square(model(inputs)))


def mixed_precision(precision: str) -> Callable[[Machine, bool], Step]:
    """Return the builder of a loop that trains a GPT in single precision, or under autocast.

    Args:
        precision: ``highest`` for plain float32 products, torch's default, or ``high`` for TF32.
    """

    def build(machine: Machine, tuned: bool) -> Step:
        model, loss = _gpt_loss(machine, is_bf16=tuned)
        train = _train(_sgd(model), loss)

        def step() -> None:
            # Of the whole process, so only as long as this loop has its turn.
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                train()
            finally:
                torch.set_float32_matmul_precision(before)

        return step

    return build


def tiny_kernels(machine: Machine, tuned: bool) -> Step:
    """Launch the short kernels of a small network one by one, or as CUDA graphs."""
    model = ResNet((1, 1, 1, 1), 1, 10, is_small=True).to(machine.device)
    side = machine.amount(32, 8)
    images = torch.randn(machine.amount(32, 2), 3, side, side, device=machine.device)
    # A rehearsal does not compile: that takes longer than all the rest.
    is_compiled = tuned and not machine.is_rehearsal
    forward: Callable[[Tensor], Tensor] = (
        torch.compile(model, mode="reduce-overhead") if is_compiled else model
    )

    def loss() -> Tensor:
        with _bf16(machine):
            return _square(forward(images))

    return _train(_sgd(model), loss)


def batch_size(machine: Machine, tuned: bool) -> Step:
    """Train on a batch that is too small for the host to keep up, or on one of twice the size."""
    width, batch = machine.amount(2048, 32), machine.amount(2048, 8)
    model = nn.Sequential(*[_Reshaped(width) for _ in range(machine.amount(8, 2))])
    model = model.to(machine.device, torch.bfloat16)
    inputs = torch.randn(2 * batch if tuned else batch, width, device=machine.device, dtype=torch.bfloat16)
    return _train(_sgd(model), lambda: _square(model(inputs)))


def host_compute(machine: Machine, tuned: bool) -> Step:
    """Draw the noise of each step on the host, or on the device."""
    rows, width = machine.amount(2048, 8), machine.amount(1024, 32)
    model = _mlp(width, *[4 * width] * 3, width).to(machine.device)
    inputs = torch.randn(rows, width, device=machine.device)

    def loss() -> Tensor:
        where = machine.device if tuned else "cpu"
        noise = torch.randn(rows, width, device=where).to(machine.device)
        with _bf16(machine):
            return functional.mse_loss(model(inputs + noise).float(), noise)

    return _train(_sgd(model), loss)


def needless_synchronisation(machine: Machine, tuned: bool) -> Step:
    """Read the norm of every gradient at once, or leave them on the device."""
    model, loss = _gpt_loss(machine)
    optimizer, parameters = _sgd(model), list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        norms = [each.grad.norm() for each in parameters if each.grad is not None] if tuned else []
        if not tuned:
            norms = [each.grad.norm().item() for each in parameters if each.grad is not None]
        assert len(norms) == len(parameters)
        optimizer.step()

    return step


LOOPS: Final = (
    SlowLoop("tiny-kernels", tiny_kernels),
    SlowLoop("batch-size", batch_size, profile_memory=True, batches=2),
    SlowLoop("needless-synchronisation", needless_synchronisation),
    SlowLoop("host-compute", host_compute),
    SlowLoop("fused-optimizer", fused_optimizer),
    SlowLoop("pin-memory", pin_memory),
    SlowLoop("loader-workers", loader_workers),
    SlowLoop("whole-batches", whole_batches),
    SlowLoop("mixed-precision", mixed_precision("high"), "TF32"),
    SlowLoop("mixed-precision", mixed_precision("highest"), "float32"),
    SlowLoop("float64", float64),
    SlowLoop("zero-grad", zero_grad),
)
"""Those whose launches count come first: the first recording makes later launches of the process slower."""
