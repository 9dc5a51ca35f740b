"""The account of a step: where each of its milliseconds goes. Its parts sum to the step. Pure.

Diagnosis makes it; wire, JSON, metrics and everything that people read follow from it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, Any, Final

from torchperfd.model.formatting import duration
from torchperfd.model.messages import AtMost, Name, Seconds, from_document, unpack

MIN_SHOWN_SHARE: Final = 0.01
"""Parts below this share of the step are summed as the rest, wherever people read an account."""
MIN_OPEN_SHARE: Final = 0.2
"""A part of this share that is not computing, and that no cause explains, is said in words."""
MAX_ERROR: Final = 0.05
"""Beyond this error of the replay, as a share of the step, the parts are not certain."""
REST: Final = "rest"
_MIN_REST: Final = 0.001
_UNITS: Final = ((0.99949, 1.0, "s"), (0.99949e-3, 1e-3, "ms"), (0.0, 1e-6, "µs"))
"""The unit of a step and of its parts: the least step in seconds, the unit in seconds, and its name."""
_WHOLE: Final = 50
"""A step of more units than these has its parts in whole ones."""
_LONG_S: Final = 99.95
"""From here on :func:`duration` has two units, which a part could not leave out."""


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


_NAMES: Final = frozenset(kind.value for kind in PartKind)


def part_kind(name: str) -> PartKind:
    """Return the kind of this name; one of a newer version is unnamed."""
    return PartKind(name) if name in _NAMES else PartKind.UNNAMED


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the step.

    Attributes:
        name: The phase of a part that computes or is unnamed, the cause of a loss; empty for other kinds.
        seconds: Mean per step.
        rank: The late rank; None for other kinds.
    """

    kind: Annotated[PartKind, part_kind]
    name: Name
    seconds: Seconds
    rank: int | None = None

    @property
    def words(self) -> str:
        if self.kind in (PartKind.COMPUTING, PartKind.LOSS):
            return self.name or self.kind.value
        if self.kind is PartKind.UNNAMED:
            return f"in {self.name}, unnamed" if self.name else "unnamed"
        if self.kind is PartKind.LATE_RANK:
            return "waiting for a late rank" if self.rank is None else f"waiting for rank {self.rank}"
        return _WORDS[self.kind]

    @property
    def label(self) -> str:
        """The same for a column of a table, with at most 24 characters beside a name."""
        return _LABELS.get(self.kind) or self.words.replace("waiting", "wait")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the account as people read it.

    Attributes:
        words: What the part is; :data:`REST` for the sum of the small ones.
        label: The same for a column of a table.
        share: Its part of the step.
        kind: None for the rest.
        is_hidden: Whether the time is beside the step, and costs nothing.
    """

    words: str
    label: str
    seconds: float
    share: float
    kind: PartKind | None = None
    is_hidden: bool = False

    def to_document(self) -> dict[str, Any]:
        """Return the row as documents of what people read have it; the kind of the rest is its name."""
        return {**asdict(self), "kind": self.kind.value if self.kind else REST}


@dataclass(frozen=True, slots=True)
class Account:
    """The parts of a run's mean step.

    Attributes:
        step_seconds: The measured step, to which the parts sum.
        replayed_seconds: The step that the model yields from the same records.
        parts: The largest first.
        hidden: Time beside the step, such as a wait of the host while its device works. It costs nothing.
    """

    step_seconds: Seconds
    replayed_seconds: Seconds
    parts: Annotated[tuple[Part, ...], AtMost(128)]
    hidden: Annotated[tuple[Part, ...], AtMost(128)] = ()

    @classmethod
    def from_verdict(cls, verdict: Any) -> "Account | None":
        """Return the account of a ``torchperfd.v1`` message ``Verdict``; None if it has none."""
        if not verdict.HasField("account"):
            return None
        return unpack(verdict.account, cls)

    @classmethod
    def from_document(cls, kept: dict[str, Any]) -> "Account":
        """Return the account of a document.

        Raises:
            ValueError: It is damaged, as with ``KeyError``, ``TypeError`` and ``AttributeError``.
        """
        return from_document(kept, cls)

    def to_document(self) -> dict[str, Any]:
        """Return the account as documents have it: seconds per step, shares of the step, and its words."""
        return {
            "step_seconds": self.step_seconds,
            "replayed_seconds": self.replayed_seconds,
            "words": self.words,
            "parts": [self._part_document(part) for part in self.parts],
            "hidden": [self._part_document(part) for part in self.hidden],
        }

    @property
    def error(self) -> float:
        """The error of the replay as a share of the step, at least 0."""
        if self.step_seconds <= 0:
            return 0.0
        return abs(self.replayed_seconds - self.step_seconds) / self.step_seconds

    def seconds(self, *kinds: PartKind) -> float:
        return sum(part.seconds for part in self.parts if part.kind in kinds)

    def share(self, *kinds: PartKind) -> float:
        return self._share(self.seconds(*kinds))

    @property
    def rows(self) -> tuple[Row, ...]:
        """The parts that people read, the largest first, then the rest. They sum to the step within 0.1 %."""
        return self._rows(self.parts)

    @property
    def hidden_rows(self) -> tuple[Row, ...]:
        """The time beside the step, the largest first, without what is below the least shown share."""
        return tuple(replace(row, is_hidden=True) for row in self._rows(self.hidden) if row.kind is not None)

    @property
    def has_more_than_phases(self) -> bool:
        """Whether it has rows that a table of phases lacks."""
        phases = (PartKind.COMPUTING, PartKind.DATA, PartKind.UNNAMED, None)
        return bool(self.hidden_rows) or any(row.kind not in phases for row in self.rows)

    @property
    def words(self) -> str:
        """The account in one line, computing first, such as "of each 85.6 ms: 34 computing, 42 waiting for
        ranks whose work differs from step to step, 8 exchange, 1 rest".
        """
        unit, name = next((unit, name) for least, unit, name in _UNITS if self.step_seconds >= least)
        is_long = self.step_seconds >= _LONG_S
        step = f"{self.step_seconds:.0f} {name}" if is_long else duration(self.step_seconds)
        computing = Part(PartKind.COMPUTING, "", self.seconds(PartKind.COMPUTING))
        others = (part for part in self.parts if part.kind is not PartKind.COMPUTING)
        rows = sorted(self._rows((computing, *others)), key=lambda row: row.kind is not PartKind.COMPUTING)
        # In few digits, a smaller rest is nothing.
        rows = [row for row in rows if row.share >= MIN_SHOWN_SHARE / 2]
        whole = self.step_seconds / unit
        shown = (f"{_number(row.seconds / unit, whole)} {row.words}" for row in rows)
        return f"of each {step}: {', '.join(shown)}"

    @property
    def doubt(self) -> str:
        """That the parts are not certain, in words, if the model does not replay the step; else empty."""
        if self.error <= MAX_ERROR:
            return ""
        replayed = duration(self.replayed_seconds)
        return f"not certain: a replay of the same records takes {replayed}, {self.error:.0%} off"

    @property
    def open_words(self) -> str:
        """The largest part of the step that is not computing, such as "52% is waiting for data"; empty if
        it is below :data:`MIN_OPEN_SHARE`.
        """
        row = next((each for each in self.rows if each.kind not in (PartKind.COMPUTING, None)), None)
        return f"{row.share:.0%} is {row.words}" if row and row.share >= MIN_OPEN_SHARE else ""

    def _part_document(self, part: Part) -> dict[str, Any]:
        return {
            "kind": part.kind.value,
            "name": part.name or None,
            "rank": part.rank,
            "seconds": part.seconds,
            "share": self._share(part.seconds),
            "words": part.words,
        }

    def _share(self, seconds: float) -> float:
        return seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    def _rows(self, parts: Iterable[Part]) -> tuple[Row, ...]:
        found: dict[tuple[PartKind, str], Row] = {}
        for part in parts:
            key = part.kind, part.words
            row = found.get(key) or Row(part.words, part.label, 0.0, 0.0, part.kind)
            found[key] = self._with(row, part.seconds)
        large = [row for row in found.values() if row.share >= MIN_SHOWN_SHARE]
        small = [row.seconds for row in found.values() if row.share < MIN_SHOWN_SHARE]
        rest = self._with(Row(REST, REST, 0.0, 0.0), sum(small))
        large.sort(key=lambda row: -row.seconds)
        return (*large, *([rest] if rest.share >= _MIN_REST else []))

    def _with(self, row: Row, seconds: float) -> Row:
        summed = row.seconds + seconds
        return replace(row, seconds=summed, share=self._share(summed))


def parts_beside(before: Account, after: Account) -> tuple[tuple[str, float, float], ...]:
    """Return the rows of two accounts by their words, each with its seconds before and after.

    The largest is first and the rest last; what one of them lacks is 0 there.
    """
    one, other = ({row.words: row.seconds for row in account.rows} for account in (before, after))
    pairs = [(words, one.get(words, 0.0), other.get(words, 0.0)) for words in {**one, **other}]
    return tuple(sorted(pairs, key=lambda pair: (pair[0] == REST, -max(pair[1:]))))


_WORDS: Final = {
    PartKind.DATA: "waiting for data",
    PartKind.UNEVEN_WORK: "waiting for ranks whose work differs from step to step",
    PartKind.EXCHANGE: "exchange",
    PartKind.LOCK: "waiting for Python's interpreter",
}


_LABELS: Final = {
    PartKind.UNEVEN_WORK: "wait, uneven work",
    PartKind.LOCK: "wait for interpreter",
}


def _number(value: float, step: float) -> str:
    """Return a part in the unit of the step, without that unit: a whole number where that is exact enough."""
    if step >= _WHOLE:
        return f"{max(1.0, value):.0f}"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
