"""The account of a step: where each of its milliseconds goes. Its parts sum to the step. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from torchperfd.durations import duration

_SHOWN_SHARE: Final = 0.01
"""Parts below this share of the step are summed as the rest, in the account's one line."""


class PartKind(Enum):
    """What a part of the step is. The value is its name in JSON and metrics."""

    COMPUTING = "computing"
    """Work of a phase on the resource that bounds the step."""
    LOSS = "loss"
    """Time of a named cause within a rank's own work."""
    DATA = "data"
    """Waiting for the loader."""
    LATE_RANK = "late_rank"
    """Waiting for a rank that is always late."""
    UNEVEN_WORK = "uneven_work"
    """Waiting for ranks whose work differs from step to step."""
    EXCHANGE = "exchange"
    """In collectives after the last rank has arrived."""
    LOCK = "lock"
    """The training thread stands still while another thread holds Python's interpreter."""
    UNNAMED = "unnamed"
    """In no part that diagnosis can judge."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the step.

    Attributes:
        name: The phase of a part that computes or is unnamed, the cause of a loss; empty for other kinds.
        seconds: Mean per step.
        rank: The late rank; None for other kinds.
    """

    kind: PartKind
    name: str
    seconds: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """The parts of a run's mean step.

    Attributes:
        step_seconds: The measured step, to which the parts sum.
        replayed_seconds: The step that the model yields from the same records.
        parts: The largest first.
        hidden: Time beside the step, such as a wait of the host while its device works. It costs nothing.
    """

    step_seconds: float
    replayed_seconds: float
    parts: tuple[Part, ...]
    hidden: tuple[Part, ...] = ()

    @property
    def error(self) -> float:
        """The error of the replay as a share of the step, at least 0."""
        if self.step_seconds <= 0:
            return 0.0
        return abs(self.replayed_seconds - self.step_seconds) / self.step_seconds

    def seconds(self, *kinds: PartKind) -> float:
        """Return the sum of all parts of these kinds."""
        return sum(part.seconds for part in self.parts if part.kind in kinds)

    def share(self, *kinds: PartKind) -> float:
        """Return the same as a share of the step."""
        return self.seconds(*kinds) / self.step_seconds if self.step_seconds else 0.0

    @property
    def words(self) -> str:
        """The account in one line, such as "of each 85.6 ms: 34 computing, 42 waiting for ranks whose work
        differs from step to step, 8 exchange, 1 rest".
        """
        shown, rest = [], 0.0
        for text, seconds in self._summands():
            if seconds >= _SHOWN_SHARE * self.step_seconds:
                shown.append(f"{_number(seconds, self.step_seconds)} {text}")
            else:
                rest += seconds
        if rest >= _SHOWN_SHARE / 2 * self.step_seconds:
            shown.append(f"{_number(rest, self.step_seconds)} rest")
        return f"of each {duration(self.step_seconds)}: {', '.join(shown)}"

    def _summands(self) -> Iterable[tuple[str, float]]:
        """Return the parts in words; computing is one of them, whatever its phase."""
        computing = self.seconds(PartKind.COMPUTING)
        found = [("computing", computing)] if computing else []
        for part in self.parts:
            if part.kind is not PartKind.COMPUTING:
                found.append((part_words(part), part.seconds))
        return sorted(found, key=lambda each: -each[1])


def part_words(part: Part) -> str:
    """Return what a part of the step is, in a few words."""
    if part.kind in (PartKind.COMPUTING, PartKind.LOSS):
        return part.name
    if part.kind is PartKind.UNNAMED:
        return f"in {part.name}, unnamed" if part.name else "unnamed"
    if part.kind is PartKind.LATE_RANK:
        return f"waiting for rank {part.rank}"
    return _WORDS[part.kind]


_WORDS: Final = {
    PartKind.DATA: "waiting for data",
    PartKind.UNEVEN_WORK: "waiting for ranks whose work differs from step to step",
    PartKind.EXCHANGE: "exchange",
    PartKind.LOCK: "waiting for Python's interpreter",
}


def _number(seconds: float, step: float) -> str:
    """Return a time in the unit of the step, without that unit."""
    scale = 1.0 if step >= 1 else 1e3 if step >= 1e-3 else 1e6
    value = seconds * scale
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
