"""What a check has found: a table, what must hold of it, and notes."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that must hold.

    Attributes:
        text: What must hold, with the measured figure.
        held: Whether it did; None where this machine cannot show it.
    """

    text: str
    held: bool | None


@dataclass(slots=True)
class Outcome:
    """What one check has found.

    Attributes:
        columns: Headers of the table.
        rows: Its rows, as printed; as many cells each as there are columns.
        bounds: What must hold.
        notes: Sentences for the reader.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Outcome":
        return cls(
            document["columns"],
            document["rows"],
            [Bound(**bound) for bound in document["bounds"]],
            document["notes"],
        )
