"""Step times of healthy runs: made-up noise of several kinds, and real loops', recorded."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TextIO

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

STEP_SECONDS: Final = 0.1
RECORDED: Final = Path(__file__).parents[2] / "build" / "accuracy"
RECORDED_STEPS: Final = 24_000
LOOPS: Final = {"waiting": 6, "computing": 1}
"""Kinds of recordings, and how many loops run at the same time."""

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


def recorded(kind: str, *, again: bool = False) -> list[Float64]:
    """Return the step times of real loops in seconds, recorded now unless that was done before.

    Each loop trains on one thread for 24,000 steps of some 20 ms: eight minutes. From each step the time is
    taken away in which the thread was ready and got no processor. What is left is the loop's own noise, with
    that of timers, caches, clock rates and neighbours on the same core.

    Args:
        kind: ``computing``, one loop that computes all the time, as on a machine without a device; or
            ``waiting``, six at the same time, each of which waits most of its step, as for a device.
        again: Record, whatever there is.

    Returns:
        For each loop an array of steps.
    """
    path = RECORDED / f"steps-{kind}.npy"
    if again or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        loops = [kind] * LOOPS[kind]
        with ProcessPoolExecutor(len(loops), get_context("spawn")) as processes:
            np.save(path, np.array(list(processes.map(_record, loops)), dtype=np.float32))
    return [*np.load(path).astype(np.float64)]


def _record(kind: str) -> Float64:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    wait, width, batch = (0.018, 256, 64) if kind == "waiting" else (0.0, 1024, 192)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(
        linear(width, width), torch.nn.ReLU(), linear(width, width), torch.nn.ReLU(), linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    taken = np.empty(RECORDED_STEPS)
    with Path("/proc/thread-self/schedstat").open() as schedstat:
        began, queued = time.perf_counter_ns(), _queued_ns(schedstat)
        for index in range(RECORDED_STEPS):
            time.sleep(wait)
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
