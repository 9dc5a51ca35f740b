"""Trends in ``top``: sparklines, and the throughput of runs over the last half minute."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import grpc
import numpy as np

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.views.live import RunView, steady

_TICKS: Final = "▁▂▃▄▅▆▇█"
_KEPT: Final = 64
_ASK_EVERY_S: Final = 5.0
_TIMEOUT_S: Final = 2.0


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as a line of blocks, from 0 to the largest; means, where they are many."""
    if not len(values) or width <= 0:
        return ""
    parts = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = [float(part.mean()) for part in parts]
    most = max(means)
    if most <= 0:
        return _TICKS[0] * len(means)
    return "".join(_TICKS[min(len(_TICKS) - 1, int(mean / most * len(_TICKS)))] for mean in means)


def step_seconds(messages: Sequence[control_pb2.RankSteps]) -> dict[str, tuple[float, ...]]:
    """Return the newest step times of each run: those of its rank with the lowest number that has any."""
    found: dict[str, tuple[int, tuple[float, ...]]] = {}
    for message in messages:
        identity = message.status.identity
        if message.count and identity.rank < found.get(identity.run, (1 << 32, ()))[0]:
            times = np.frombuffer(steady(message).duration_ns, "<i8") / 1e9
            found[identity.run] = identity.rank, tuple(times.tolist())
    return {run: times for run, (_, times) in found.items()}


def ages(messages: Sequence[control_pb2.RankSteps], now: float) -> dict[str, float]:
    """Return the seconds since the newest step of each run.

    Args:
        now: Unix seconds.
    """
    newest: dict[str, float] = {}
    for message in messages:
        status = message.status
        run, ended = status.identity.run, status.last_step_unix_seconds
        if ended and ended > newest.get(run, 0.0):
            newest[run] = ended
    return {run: max(0.0, now - ended) for run, ended in newest.items()}


class Throughput:
    """The samples per second of runs, from the samples in a step and its newest duration."""

    def __init__(self) -> None:
        self._per_step: dict[str, float] = {}
        self._rates: dict[str, deque[float]] = {}
        self._asked_at = 0.0

    def update(self, daemon: Any, runs: Sequence[RunView], now: float) -> None:
        """Add the present rates; ask the daemon for the samples of a step from time to time.

        Args:
            now: Monotonic seconds.
        """
        if not self._asked_at or now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            for run in runs:
                self._per_step[run.run] = _samples_per_step(daemon, run.run)
        for run in runs:
            samples = self._per_step.get(run.run, 0.0)
            if samples and run.step_seconds:
                self._rates.setdefault(run.run, deque(maxlen=_KEPT)).append(samples / run.step_seconds)

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Return the newest rates of each run whose samples are known, oldest first."""
        return {run: tuple(rates) for run, rates in self._rates.items()}


def _samples_per_step(daemon: Any, run: str) -> float:
    """Return the samples that all ranks on this node train on in a step; 0 if unknown."""
    try:
        ranks = daemon.GetRun(control_pb2.GetRunRequest(run=run), timeout=_TIMEOUT_S).ranks
    except grpc.RpcError:
        return 0.0
    per_step: list[float] = [
        kind.samples / kind.steps
        for rank in ranks
        for kind in rank.account.kinds
        if kind.kind == session_pb2.STEP_KIND_TRAIN and kind.steps
    ]
    return sum(per_step)
