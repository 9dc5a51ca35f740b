"""Small models of three kinds: replicated, sharded, or with layers that are split."""

import random
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from benchmarks.simulated_device import Device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

FEATURES: Final = 64
CLASSES: Final = 10
_WIDTH: Final = 32
_LAYERS: Final = 80
_JITTER: Final = 0.03


def _scattered(seconds: float, chance: random.Random) -> float:
    return max(0.0, seconds * chance.gauss(1.0, _JITTER))


class Pace(nn.Module):
    """Waits in the forward, as for a device, and does what a fault adds there.

    Args:
        seconds: How long, in the mean; single steps scatter by 3 %.
        work_seconds: Processor time of this thread that it uses besides.
        seed: Of the scatter.
        extra: Called in every forward.
    """

    def __init__(self, seconds: float, work_seconds: float, seed: int, extra: Callable[[], None]) -> None:
        super().__init__()
        self._seconds = seconds
        self._work_seconds = work_seconds
        self._chance = random.Random(seed)
        self._extra = extra

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs, later."""
        time.sleep(_scattered(self._seconds, self._chance))
        until = time.thread_time() + self._work_seconds
        while time.thread_time() < until:
            inputs.square().sum()
        self._extra()
        return inputs


class Kernels(nn.Module):
    """Launches kernels on a simulated device in the forward and in the backward, and what a fault adds.

    Args:
        seconds: What they take in the mean; single steps scatter by 3 %. Three fifths are the backward's.
        seed: Of the scatter.
        extra: Called in every forward.
    """

    def __init__(self, device: Device, seconds: float, seed: int, extra: Callable[[], None]) -> None:
        super().__init__()
        self._device = device
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._extra = extra

    def forward(self, outputs: Tensor) -> Tensor:
        """Return the outputs at once."""
        seconds = _scattered(self._seconds, self._chance)
        self._device.compute.launch_kernel(0.4 * seconds)
        self._extra()
        launched: Tensor = _Launch.apply(  # type: ignore[no-untyped-call]
            outputs, self._device, 0.6 * seconds
        )
        return launched


class _Launch(torch.autograd.Function):
    """Nothing in the forward; in the backward a kernel."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, device: Device, seconds: float) -> Tensor:
        context.device, context.seconds = device, seconds
        return outputs.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        context.device.compute.launch_kernel(context.seconds)
        return gradients[0], None, None


def _mlp() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU()),
        nn.Sequential(nn.Linear(128, 128), nn.ReLU()),
        nn.Linear(128, CLASSES),
    ]


def _convnet() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(8 * FEATURES, CLASSES),
    ]


def _transformer() -> list[nn.Module]:
    layers = (nn.TransformerEncoderLayer(_WIDTH, 2, 64, batch_first=True, dropout=0.0) for _ in range(2))
    return [
        nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, _WIDTH)),
        *layers,
        nn.Sequential(nn.Flatten(), nn.Linear(8 * _WIDTH, CLASSES)),
    ]


def _deep() -> list[nn.Module]:
    return [
        *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(_LAYERS)),
        nn.Linear(FEATURES, CLASSES),
    ]


_KINDS: Final = {"mlp": _mlp, "deep": _deep, "convnet": _convnet, "transformer": _transformer}

_TENSOR_PARALLEL: Final[dict[str, dict[str, ParallelStyle]]] = {
    "mlp": {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()},
    "convnet": {"2": RowwiseParallel(input_layouts=Replicate())},
}
"""Which layers tensor parallelism splits; an all-reduce follows each that is split by rows."""


def blocks_of(kind: str) -> list[nn.Module]:
    """Return the layers of a model of (batch, 64) to (batch, 10) floats."""
    return _KINDS[kind]()


def build(name: str, pace: Pace | Kernels) -> nn.Module:
    """Return a model of (batch, 64) to (batch, 10) floats, by a name such as ``convnet-fsdp2``.

    Kernels come last, so that the backward launches them before any gradient is there.
    """
    kind, _, parallel = name.partition("-")
    torch.manual_seed(0)
    blocks = blocks_of(kind)
    model = nn.Sequential(*blocks, pace) if isinstance(pace, Kernels) else nn.Sequential(pace, *blocks)
    if parallel == "ddp":
        return DistributedDataParallel(model)
    if parallel == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, _TENSOR_PARALLEL[kind])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(model)[1:]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
