"""Where a script spends its time: the lines of it, and the stages of a batch in its loader."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from torchperfd.model.formatting import duration
from torchperfd.model.messages import Count, FilePath, LineNumber, Name, Nanoseconds, Sentence, Share, unpack


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


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A line of the script.

    Attributes:
        call: The name of what it calls, such as ``all_reduce``; empty if unknown.
    """

    file: FilePath
    line: LineNumber
    call: Name

    @property
    def place(self) -> tuple[str, int, str]:
        """All but the numbers that were measured."""
        return self.file, self.line, self.call

    @property
    def words(self) -> str:
        """Where it is, such as ``all_reduce() at train.py:57``."""
        call = f"{self.call}() at " if self.call else ""
        return f"{call}{PurePath(self.file).name}:{self.line}"


@dataclass(frozen=True, slots=True)
class SyncWait(ScriptLine):
    """A line that waits for the device; ``ns`` is for how long it did in training steps, by samples."""

    ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class TimedLine(ScriptLine):
    """A line with the number of its calls since attach, and the time that they took."""

    calls: Count
    ns: Nanoseconds


# Files of the client, as they stand in stacks.
HOOKS_FOLDER: Final = "/torchperfd/hooks/"
"""Its wrappers of torch's functions: their frames are between the script's or torch's and the native call."""
WRAPPED_DRAWS_FILE: Final = "/torchperfd/steps/wrapped.py"
"""Its frame shows that the script draws from an iterable that it has wrapped."""
CALLING_FILES: Final = ("hooks/distributed.py", "hooks/collectives.py")
"""Of wrappers that record an event, call the wrapped function and record another event; they cannot hang.

Clients of the version before have them in the second one.
"""

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
        call: What the line calls; empty if unknown.
        share: The part of the samples at this line, 0 to 1.
        samples: Of processes that were loading, or of the host's work in a step.
        in_workers: The samples are of DataLoader workers, not of the training thread.
        of_step: The samples are of the host's work in a step, not of loading.
        caller: The dataset's line that leads to it, such as ``train.py:21 in __getitem__``; empty where it is
            the line itself.
    """

    stage: Sentence
    stage_share: Share
    file: Sentence = ""
    line: LineNumber = 0
    function: Sentence = ""
    call: Sentence = ""
    share: Share = 0.0
    samples: int = 0
    in_workers: bool = False
    of_step: bool = False
    caller: Sentence = ""

    @classmethod
    def from_verdict(cls, verdict: Any) -> "SlowLine | None":
        """Return the line of a ``torchperfd.v1`` message ``Verdict``; None if it is unknown, or not shown."""
        if not verdict.HasField("line"):
            return None
        return unpack(verdict.line, cls)

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
