"""Step times of healthy runs: made-up noise of several kinds, and a real loop's, recorded."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

STEP_SECONDS: Final = 0.1
RECORDED: Final = Path(__file__).parents[2] / "build" / "accuracy"
RECORDED_STEPS: Final = 24_000

_MEMORY: Final = 0.6
_SHORTEST: Final = 0.05
# What scales Student's t of 3 degrees of freedom so that its middle half is as wide as the normal's.
_T3_SCALE: Final = 0.6745 / 0.7649


def _normal(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    return 1 + spread * rng.standard_normal(steps)


def _lognormal(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    return np.exp(spread * rng.standard_normal(steps))


def _heavy(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    return 1 + spread * _T3_SCALE * rng.standard_t(3, steps)


def _remembering(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    fresh = rng.standard_normal(steps) * np.sqrt(1 - _MEMORY**2)
    value = rng.standard_normal()
    series = np.empty(steps)
    for index, each in enumerate(fresh):
        value = _MEMORY * value + each
        series[index] = value
    return 1 + spread * series


def _spiky(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    series = _normal(steps, spread, rng)
    series[rng.integers(7) :: 7] *= 1.4
    series[rng.integers(50) :: 50] *= 3
    return series


def _drifting(steps: int, spread: float, rng: np.random.Generator) -> Float64:
    return _normal(steps, spread, rng) * (1 + 0.03 * np.arange(steps) / 10_000)


KINDS: Final[dict[str, Callable[[int, float, np.random.Generator], Float64]]] = {
    "normal": _normal,
    "lognormal": _lognormal,
    "heavy tails (t3)": _heavy,
    "memory (AR 0.6)": _remembering,
    "periodic spikes": _spiky,
    "drift of 3 %/10k": _drifting,
}


def made_up(kind: str, steps: int, spread: float, rng: np.random.Generator) -> Float64:
    """Return step times in seconds with noise of a kind of :data:`KINDS`; ``spread`` is relative.

    The spread is the standard deviation, for heavy tails that of a normal with the same quartiles, and for
    spikes that of the steps between them.
    """
    return STEP_SECONDS * np.maximum(KINDS[kind](steps, spread, rng), _SHORTEST)


def recorded(name: str, *, again: bool = False) -> Float64:
    """Return the step times of a real loop in seconds, recorded now unless that was done before.

    A small network trains on one thread of this machine for 24,000 steps. From each step the time is
    taken away in which the thread was ready and got no processor: what is left is the loop's own noise, with
    that of caches, clock rates and neighbours on the same core.
    """
    path = RECORDED / f"steps-{name}.npy"
    if again or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, _record(RECORDED_STEPS).astype(np.float32))
    found: Float64 = np.load(path).astype(np.float64)
    return found


def _record(steps: int) -> Float64:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(
        linear(256, 256), torch.nn.ReLU(), linear(256, 256), torch.nn.ReLU(), linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(128, 256), torch.randint(0, 10, (128,))
    taken = np.empty(steps)
    with Path("/proc/thread-self/schedstat").open() as schedstat:
        began, queued = time.perf_counter_ns(), _queued_ns(schedstat)
        for index in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ended, waited = time.perf_counter_ns(), _queued_ns(schedstat)
            taken[index] = max(1, ended - began - (waited - queued)) / 1e9
            began, queued = ended, waited
    return taken


def _queued_ns(schedstat: TextIO) -> int:
    """Return how long the thread has been ready without a processor (Linux, scheduler statistics)."""
    schedstat.seek(0)
    return int(schedstat.read().split()[1])
