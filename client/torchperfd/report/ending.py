"""How a script has ended, in words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

FAILED: Final = "failed"
INTERRUPTED: Final = "interrupted"
TERMINATED: Final = "terminated"
FINISHED: Final = "finished"
_SIGNALS: Final = {INTERRUPTED: "Ctrl-C", TERMINATED: "SIGTERM"}
_UNTRAINED: Final = "no training step was seen: the script has not trained with torch"

# Of torch.utils.data, as it describes a worker's end: the name of the signal, or none.
_DEAD_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
    r"(?:is killed by signal: (?P<signal>[\w ]+?)\.|exited unexpectedly)"
)
_BUS_ERROR: Final = "SIGBUS"
_KILLED: Final = "SIGKILL"
_SIGNAL_NAMES: Final = {"Bus error": _BUS_ERROR, "Killed": _KILLED, "Segmentation fault": "SIGSEGV"}
_FULL: Final = 0.9
_WORKER_DIED: Final = "a DataLoader worker died"
_REMEDIES: Final = {
    f"{_WORKER_DIED} of {_BUS_ERROR}": "`docker run --shm-size=16g …`, in Kubernetes an emptyDir of medium"
    " Memory on /dev/shm, on a host `sudo mount -o remount,size=16G /dev/shm`; or num_workers=0, or a smaller"
    " prefetch_factor",
    f"{_WORKER_DIED} of {_KILLED}": "fewer workers (num_workers) or a smaller prefetch_factor, or more memory"
    " for the job; `sudo dmesg | grep -i oom` shows what the kernel has ended",
}


class RankFailure(NamedTuple):
    """The failure of a rank's script.

    Attributes:
        steps: Training steps that it made before.
        unix_seconds: When it failed, by the clock of the daemon.
    """

    rank: int
    error: str
    steps: int
    unix_seconds: float

    @property
    def words(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        when = f"after {steps}" if self.steps else "before its first step"
        return f"rank {self.rank} failed {when}: {self.error}"


def first_failure(failures: Sequence[RankFailure], own_rank: int) -> str:
    """Return which other rank failed first, in words; empty if none did before this one.

    The ranks that wait for it fail after it, or their launcher ends them.
    """
    first = min(failures, key=lambda each: each.unix_seconds, default=None)
    return "" if first is None or first.rank == own_rank else first.words


def explain_error(error: str, shm_bytes: tuple[int, int] | None) -> str:
    """Return an exception in one line, what has caused it first if its text shows that.

    Args:
        shm_bytes: The size of ``/dev/shm`` and what of it is in use; None if unknown.
    """
    found = _DEAD_WORKER.search(error)
    if found is None or not found["signal"]:
        return error
    signal = _SIGNAL_NAMES.get(found["signal"], found["signal"])
    words = f"{_WORKER_DIED} of {signal}"
    if signal == _BUS_ERROR:
        words += f": {_shm_words(shm_bytes)}"
    elif signal == _KILLED:
        words += ", which the kernel sends when memory is full"
    return f"{words} ({error})"


def _shm_words(shm_bytes: tuple[int, int] | None) -> str:
    if shm_bytes is None:
        return "/dev/shm is full or too small"
    size, used = shm_bytes
    state = "is full" if used >= _FULL * size else "was full or is too small"
    return f"/dev/shm {state}: it holds {size / 2**20:.0f} MiB, {used / 2**20:.0f} MiB in use at the end"


def failure_remedy(error: str) -> str:
    """Return what to change after a failure; empty if nothing is known.

    Args:
        error: As :func:`explain_error` returns it.
    """
    return next((fix for words, fix in _REMEDIES.items() if words in error), "")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script has ended; texts are empty if unknown.

    Attributes:
        state: ``finished``, ``failed``, ``interrupted`` or ``terminated``.
        error: The exception in one line, or the exit code.
        cause: The failure of another rank, because of which this one has ended; empty without one.
    """

    state: str = ""
    error: str = ""
    cause: str = ""

    @property
    def words(self) -> str:
        """The state, with what has caused it where that is known."""
        if self.state in _SIGNALS:
            ended = f"{self.state} by {_SIGNALS[self.state]}"
        else:
            ended = f"{self.state}: {self.error}" if self.error else self.state
        return f"{ended}, after {self.cause}" if self.cause else ended

    @property
    def failure(self) -> str:
        """Why the run failed; empty if it reached its end, or its user or a scheduler has ended it."""
        if self.state not in (FAILED, TERMINATED):
            return ""
        return self.cause or self.error or ("the script failed" if self.state == FAILED else "")

    def why_untrained(self, advice: str = "") -> str:
        """Return why there is no training step.

        Args:
            advice: What to do where training was seen but no step of it.
        """
        before = "before its first training step"
        if self.failure and self.cause:
            return self.cause
        if self.state == FAILED:
            return f"the script failed {before}{f': {self.error}' if self.error else ''}"
        ended = f"{_SIGNALS[self.state]} ended the script {before}" if self.state in _SIGNALS else ""
        if self.state == TERMINATED:
            return f"{ended}; {advice}" if advice else ended
        return advice or ended or _UNTRAINED
