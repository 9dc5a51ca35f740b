"""Slow training loops for the rules that one GPU can show, each also with the advice applied.

In each loop one thing is wrong, so that its rule should come first. Sizes are of a fast GPU; a rehearsal has
tiny ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from benchmarks.gpu_proof.loop_parts import (
    Photos,
    ReadyBatches,
    Reshaped,
    Step,
    endless,
    gpt_loss,
    mean_square,
    mlp,
    sgd,
    train,
    worker_options,
)
from benchmarks.gpu_proof.machine import Machine
from benchmarks.gpu_proof.workloads import ResNet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


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


def loader_workers(machine: Machine, tuned: bool) -> Step:
    """Transform images in the training process, or in workers that pin what they make."""
    side, is_pinned = machine.amount(96, 16), tuned and not machine.is_rehearsal
    options = worker_options(machine, 8) if tuned else {}
    batches = endless(
        DataLoader(Photos(side), machine.amount(64, 4), pin_memory=is_pinned, shuffle=True, **options)
    )
    model = mlp(3 * side * side, machine.amount(2048, 16), 16).to(machine.device)

    def loss() -> Tensor:
        images, labels = (each.to(machine.device, non_blocking=is_pinned) for each in next(batches))
        with machine.autocast():
            return functional.cross_entropy(model(images.flatten(1)), labels)

    return train(sgd(model), loss)


def whole_batches(machine: Machine, tuned: bool) -> Step:
    """Index a dataset of tensors item by item, or batch by batch."""
    count, batch = machine.amount(65_536, 256), machine.amount(512, 64)
    data = TensorDataset(torch.randn(count, 256), torch.randint(16, (count,)))
    order = BatchSampler(RandomSampler(data), batch, drop_last=False)
    options: dict[str, Any] = (
        {"batch_size": None, "sampler": order} if tuned else {"batch_size": batch, "shuffle": True}
    )
    batches = endless(DataLoader(data, **options))
    model = mlp(256, *[machine.amount(2048, 32)] * 3, 16).to(machine.device)

    def loss() -> Tensor:
        inputs, labels = (each.to(machine.device) for each in next(batches))
        with machine.autocast():
            return functional.cross_entropy(model(inputs), labels)

    return train(sgd(model), loss)


def pin_memory(machine: Machine, tuned: bool) -> Step:
    """Copy batches of images from pageable memory, or from memory that a thread of the loader has pinned."""
    side, is_pinned = machine.amount(224, 16), tuned and not machine.is_rehearsal
    images = torch.randn(machine.amount(128, 2), 3, side, side)
    options = worker_options(machine, 4)
    batches = endless(DataLoader(ReadyBatches(images), batch_size=None, pin_memory=is_pinned, **options))
    model = ResNet((2, 2, 2, 2), 1, 10, machine.amount(64, 4), is_small=False).to(machine.device)

    def loss() -> Tensor:
        inputs = next(batches).to(machine.device, non_blocking=is_pinned)
        with machine.autocast():
            return mean_square(model(inputs))

    return train(sgd(model), loss)


def fused_optimizer(machine: Machine, tuned: bool) -> Step:
    """Update parameter by parameter, or all in one kernel."""
    model, loss = gpt_loss(machine)
    parameters = model.parameters()
    optimizer = (
        torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        if tuned
        else torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
    )
    return train(optimizer, loss)


def zero_grad(machine: Machine, tuned: bool) -> Step:
    """Fill large gradients with zeros and add to them, or drop them."""
    width = machine.amount(8192, 64)
    model, inputs = mlp(*[width] * 7).to(machine.device), torch.randn(256, width, device=machine.device)

    def loss() -> Tensor:
        with machine.autocast():
            return mean_square(model(inputs))

    return train(sgd(model), loss, to_none=tuned)


def float64(machine: Machine, tuned: bool) -> Step:
    """Train in double precision, or in single."""
    width, dtype = machine.amount(4096, 64), torch.float32 if tuned else torch.float64
    model = mlp(*[width] * 5).to(machine.device, dtype)
    inputs = torch.randn(machine.amount(2048, 32), width, device=machine.device, dtype=dtype)
    return train(sgd(model), lambda: mean_square(model(inputs)))


def mixed_precision(precision: str) -> Callable[[Machine, bool], Step]:
    """Return the builder of a loop that trains a GPT in single precision, or under autocast.

    Args:
        precision: ``highest`` for plain float32 products, torch's default, or ``high`` for TF32.
    """

    def build(machine: Machine, tuned: bool) -> Step:
        model, loss = gpt_loss(machine, is_bf16=tuned)
        train_once = train(sgd(model), loss)

        def step() -> None:
            # Of the whole process, so only as long as this loop has its turn.
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                train_once()
            finally:
                torch.set_float32_matmul_precision(before)

        return step

    return build


def tiny_kernels(machine: Machine, tuned: bool) -> Step:
    """Launch the short kernels of a small network one by one, or as CUDA graphs."""
    model = ResNet((1, 1, 1, 1), 1, 10, machine.amount(64, 4), is_small=True).to(machine.device)
    images = torch.randn(machine.amount(32, 2), 3, 32, 32, device=machine.device)
    # A rehearsal does not compile: that takes longer than all the rest.
    is_compiled = tuned and not machine.is_rehearsal
    forward: Callable[[Tensor], Tensor] = (
        torch.compile(model, mode="reduce-overhead") if is_compiled else model
    )

    def loss() -> Tensor:
        with machine.autocast():
            return mean_square(forward(images))

    return train(sgd(model), loss)


def batch_size(machine: Machine, tuned: bool) -> Step:
    """Train on a batch that is too small for the host to keep up, or on one of twice the size."""
    width, batch = machine.amount(2048, 32), machine.amount(2048, 8)
    model = nn.Sequential(*[Reshaped(width) for _ in range(machine.amount(8, 2))])
    model = model.to(machine.device, torch.bfloat16)
    inputs = torch.randn(2 * batch if tuned else batch, width, device=machine.device, dtype=torch.bfloat16)
    return train(sgd(model), lambda: mean_square(model(inputs)))


def host_compute(machine: Machine, tuned: bool) -> Step:
    """Draw the noise of each step on the host, or on the device."""
    rows, width = machine.amount(2048, 8), machine.amount(1024, 32)
    model = mlp(width, *[4 * width] * 3, width).to(machine.device)
    inputs = torch.randn(rows, width, device=machine.device)

    def loss() -> Tensor:
        where = machine.device if tuned else "cpu"
        noise = torch.randn(rows, width, device=where).to(machine.device)
        with machine.autocast():
            return functional.mse_loss(model(inputs + noise).float(), noise)

    return train(sgd(model), loss)


def needless_synchronisation(machine: Machine, tuned: bool) -> Step:
    """Read the norm of every gradient at once, or leave them on the device."""
    model, loss = gpt_loss(machine)
    optimizer, parameters = sgd(model), list(model.parameters())

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
