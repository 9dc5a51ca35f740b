"""Values of a GPU from the daemon's collector beside those of nvidia-smi: a table, and what must hold.

Where both have a value, nvidia-smi's distance from the range of the daemon's readings right before and right
after it is judged: under load, values change while nvidia-smi runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu_proof.nvidia_smi import PROCESS_MEMORY, Key, Values
from benchmarks.gpu_proof.outcome import Bound, Outcome

IDLE: Final = "idle"
MATMUL: Final = "matmul"
MEAN_POWER: Final = "mean_power_watts"
"""Power from the energy counter; nvidia-smi has none, and its power stands beside it."""

_MIB: Final = 1024.0**2
_UNITS: Final = {
    "_bytes": (_MIB, " MiB", 0),
    "_watts": (1, " W", 1),
    "_joules": (1, " J", 1),
    "_celsius": (1, " °C", 0),
    "_hertz": (1e6, " MHz", 0),
    "_ratio": (0.01, " %", 1),
    "_per_second": (1e6, " MB/s", 2),
    "_seconds": (1, " s", 3),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """How far nvidia-smi may be off: the larger of a share of its value and an amount in base units."""

    share: float = 0.0
    amount: float = 0.0

    def text(self, family: str) -> str:
        parts = [f"{100 * self.share:.0f} %"] if self.share else []
        parts += [shown(family, self.amount)] if self.amount else []
        return f"within {' or '.join(parts)} of" if parts else "equal to"


LIMITS: Final[dict[str, Limit]] = {
    "gpu_memory_used_bytes": Limit(0.01, 2 * _MIB),  # nvidia-smi rounds to MiB
    "gpu_memory_total_bytes": Limit(0.01),
    PROCESS_MEMORY: Limit(0.01, 2 * _MIB),
    "gpu_power_watts": Limit(0.15),
    MEAN_POWER: Limit(0.15),
    "gpu_temperature_celsius": Limit(amount=2),
    "gpu_clock_hertz": Limit(0.05),
    "gpu_utilization_ratio": Limit(amount=0.1),
    "gpu_ecc_errors": Limit(),
    "gpu_row_remap_pending": Limit(),
    "gpu_row_remap_failure": Limit(),
    "gpu_throttle_seconds": Limit(amount=0.1),
}
"""By family. What both have and is not here is only shown."""


@dataclass(frozen=True, slots=True)
class State:
    """The values of one GPU while it is idle or loaded.

    Attributes:
        before: The daemon's right before nvidia-smi; ratios of GPM are means since the baseline.
        after: The daemon's right after it.
        printed: Those of nvidia-smi.
    """

    name: str
    before: Values
    after: Values
    printed: Values

    def ours(self, key: Key) -> tuple[float, float] | None:
        """Return the daemon's lowest and highest value around nvidia-smi."""
        if key not in self.before:
            return None
        if key not in self.printed:
            return self.before[key], self.before[key]
        ends = self.before[key], self.after.get(key, self.before[key])
        return min(ends), max(ends)

    def excess(self, key: Key) -> float | None:
        """Return nvidia-smi's distance as a multiple of the limit; None where there is nothing to judge."""
        ours, limit = self.ours(key), LIMITS.get(key[0])
        if ours is None or limit is None or key not in self.printed:
            return None
        printed = self.printed[key]
        off = max(ours[0] - printed, printed - ours[1], 0.0)
        allowed = max(limit.share * printed, limit.amount)
        return off / allowed if allowed else math.inf if off else 0.0


def shown(family: str, value: float) -> str:
    """Return a value in base units as a table has it."""
    for suffix, (scale, unit, digits) in _UNITS.items():
        if family.endswith(suffix):
            return f"{value / scale:.{digits}f}{unit}"
    return f"{value:.0f}"


def compare(states: Sequence[State]) -> Outcome:
    """Return a row for every value, and a bound for every family that is judged."""
    outcome = Outcome(["value"])
    for name in (IDLE, MATMUL):
        outcome.columns += [f"{name}: torchperfd", f"{name}: nvidia-smi"]
    outcome.columns.append("verdict")
    keys = dict.fromkeys(key for state in states for key in (*state.before, *state.printed))
    outcome.rows = [_row(key, states) for key in keys]
    outcome.bounds = [_bound(family, states, list(keys)) for family in LIMITS]
    return outcome


def _row(key: Key, states: Sequence[State]) -> list[str]:
    cells = [_name(key)]
    for state in states:
        cells += [_range(key, state), shown(key[0], state.printed[key]) if key in state.printed else "-"]
    return [*cells, _verdict(key, states)]


def _name(key: Key) -> str:
    return " ".join((key[0], *key[1]))


def _range(key: Key, state: State) -> str:
    ours = state.ours(key)
    return " to ".join(dict.fromkeys(shown(key[0], value) for value in ours)) if ours else "-"


def _verdict(key: Key, states: Sequence[State]) -> str:
    excesses = [excess for state in states if (excess := state.excess(key)) is not None]
    if excesses:
        return "agrees" if max(excesses) <= 1 else "differs"
    if not any(key in state.printed for state in states):
        return "only torchperfd"
    return "not judged" if any(key in state.before for state in states) else "only nvidia-smi"


def _bound(family: str, states: Sequence[State], keys: Sequence[Key]) -> Bound:
    text = f"{family} {LIMITS[family].text(family)} nvidia-smi's"
    judged = [
        (excess, key, state)
        for key in keys
        for state in states
        if key[0] == family and (excess := state.excess(key)) is not None
    ]
    if not judged:
        return Bound(f"{text}: no value that both have", None)
    excess, key, state = max(judged, key=lambda item: item[0])
    pair = f"{_range(key, state)} beside {shown(family, state.printed[key])}"
    return Bound(f"{text}: farthest {pair} ({' '.join((*key[1], state.name))})", excess <= 1)
