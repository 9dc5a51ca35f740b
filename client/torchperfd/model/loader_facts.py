"""The stages of making a batch: what each takes, by samples."""

from dataclasses import dataclass
from typing import Any

from torchperfd.model.formatting import duration


@dataclass(frozen=True, slots=True)
class InputStages:
    """Means for one batch, in seconds of the process that makes it; None where unknown.

    Attributes:
        workers: Worker processes of the loader; 0 if the training process makes the batches.
        samples: Batches or, of workers, stacks that the means are of.
        fetch_seconds: The dataset's work, from the choice of indices to the last item.
        collate_seconds: Of making one batch of the items.
        send_seconds: Of handing it over to the training process, as far as the worker waits for that.
        pin_seconds: Of copying it to pinned memory, which with workers a thread of the training process does.
        idle: The part of the workers' time in which they wait for indices: the loader is ahead.
    """

    workers: int = 0
    samples: int = 0
    fetch_seconds: float | None = None
    collate_seconds: float | None = None
    send_seconds: float | None = None
    pin_seconds: float | None = None
    idle: float | None = None

    @classmethod
    def from_message(cls, message: Any) -> "InputStages":
        """Return those of a ``torchperfd.v1`` message ``InputStages``."""
        return cls(**{field.name: value for field, value in message.ListFields()})

    @property
    def making_seconds(self) -> float:
        """What fetching and collating a batch take together; 0 if unknown."""
        return (self.fetch_seconds or 0.0) + (self.collate_seconds or 0.0)

    @property
    def words(self) -> str:
        """They in one line; empty without samples."""
        times = {
            "fetch": self.fetch_seconds,
            "collate": self.collate_seconds,
            "send": self.send_seconds,
            "pin": self.pin_seconds,
        }
        known = {name: seconds for name, seconds in times.items() if seconds}
        if not self.samples or not known:
            return ""
        by = "a worker " if self.workers else ""
        # The thread that pins works beside the workers.
        whole = sum(seconds for name, seconds in known.items() if name != "pin" or not self.workers)
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in known.items())
        idle = f"; workers are idle {self.idle:.0%} of the time" if self.idle else ""
        return f"making a batch takes {by}{duration(whole)}: {parts}{idle}"
