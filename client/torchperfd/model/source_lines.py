"""Lines of the script at which time is spent.

They are waits for the device, timed calls, and the line that takes longest in a stage, by samples.
"""

from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Final

from torchperfd.model.values import MAX_INT, count, number, text


@dataclass(frozen=True, slots=True)
class SyncWait:
    """A line of the script that waits for the device.

    Attributes:
        file: Of the line.
        line: Its number.
        call: The name of what waits, such as ``item``.
        ns: The time for which it did in training steps, by samples.
    """

    file: str
    line: int
    call: str
    ns: int

    @property
    def place(self) -> tuple[str, int, str]:
        """All but the time."""
        return self.file, self.line, self.call

    @property
    def words(self) -> str:
        """Where it waits, such as ``item() at train.py:57``."""
        return f"{self.call}() at {PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True)
class TimedLine:
    """A line of the script, and the calls at it since attach.

    Attributes:
        file: Of the line.
        line: Its number.
        call: The name of what it calls, such as ``all_reduce``; empty if unknown.
        calls: How often it did.
        ns: The time that these calls took.
    """

    file: str
    line: int
    call: str
    calls: int
    ns: int

    @property
    def place(self) -> tuple[str, int, str]:
        """All but the numbers."""
        return self.file, self.line, self.call

    @property
    def words(self) -> str:
        """Where it is, such as ``all_reduce() at train.py:57``."""
        call = f"{self.call}() at " if self.call else ""
        return f"{call}{PurePath(self.file).name}:{self.line}"


THREAD: Final = "thread"
"""The stage of samples of threads beside the training thread."""


@dataclass(frozen=True, slots=True)
class SlowLine:
    """The stage of loading, or the part of a step, that takes longest, and the line in it that does.

    Attributes:
        stage: Of loading: ``fetch``, ``collate``, ``pin``, ``sampler``, ``send`` or ``other``; of a step:
            ``forward``, ``optimizer`` or ``other``; ``thread`` for threads beside the training thread.
        stage_share: The part of the samples in this stage, 0 to 1.
        file: Of the line; empty where no line stands out.
        line: Its number.
        function: That the line is in.
        call: What the line calls; empty if unknown.
        share: The part of the samples at this line, 0 to 1.
        samples: Of processes that were loading, or of the host's work in a step.
        in_workers: The samples are of DataLoader workers, not of the training thread.
        of_step: The samples are of the host's work in a step, not of loading.
        caller: The dataset's line that leads to it, such as ``train.py:21 in __getitem__``; empty where it is
            the line itself.
    """

    stage: str
    stage_share: float
    file: str = ""
    line: int = 0
    function: str = ""
    call: str = ""
    share: float = 0.0
    samples: int = 0
    in_workers: bool = False
    of_step: bool = False
    caller: str = ""

    @classmethod
    def from_verdict(cls, verdict: Any) -> "SlowLine | None":
        """Return the line of a ``torchperfd.v1`` message ``Verdict``; None if it is unknown, or not shown."""
        if not verdict.HasField("line"):
            return None
        return cls(**{each.name: getattr(verdict.line, each.name) for each in fields(cls)})

    @classmethod
    def from_document(cls, kept: dict[str, Any]) -> "SlowLine":
        """Return the line of a document, without the number of samples.

        Raises:
            ValueError: It is damaged, as with ``KeyError``, ``TypeError`` and ``AttributeError``.
        """
        return cls(
            stage=text(kept["stage"]),
            stage_share=number(kept["stage_share"]),
            file=text(kept.get("file")),
            line=count(kept.get("line") or 0, MAX_INT),
            function=text(kept.get("function")),
            call=text(kept.get("call")),
            share=number(kept.get("share") or 0),
            in_workers=bool(kept.get("in_workers")),
            of_step=bool(kept.get("of_step")),
            caller=text(kept.get("caller")),
        )

    @property
    def words(self) -> str:
        """It in one line, such as ``train.py:37 in __getitem__, calls sleep: 93% of loading (fetch 98%)``."""
        whole = "the workers' loading" if self.in_workers else "loading"
        if self.of_step:
            whole = "the host's work"
        if self.stage == THREAD:
            whole = "the time of other threads"
        if not self.file:
            return f"{self.stage} is {self.stage_share:.0%} of {whole}; no line of it stands out"
        calls = f", calls {self.call}" if self.call else ""
        caller = f", from {self.caller}" if self.caller else ""
        stage = "" if self.stage == THREAD else f" ({self.stage} {self.stage_share:.0%})"
        return (
            f"{place_words(self.file, self.line, self.function)}{calls}:"
            f" {self.share:.0%} of {whole}{stage}{caller}"
        )


def place_words(file: str, line: int, function: str) -> str:
    """Return a line in words, such as ``train.py:37 in __getitem__``."""
    return f"{PurePath(file).name}:{line} in {function}"
