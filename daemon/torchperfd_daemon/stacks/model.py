"""What is known of where the threads of ranks are."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

_CONNECTION: Final = "/grpc/_channel.py"
_RECENT_S: Final = 2.0
_RECENT_STEPS: Final = 3
# A wrapper there writes an event, calls what it stands for, and writes another: nothing to hang in.
_ONLY_CALLS_TORCH: Final = ("hooks/collectives.py", "hooks/gradients.py")
_THREADS_BEGIN_IN: Final = ("_bootstrap", "_bootstrap_inner")


class Outcome(Enum):
    """How a rank's stacks were obtained, or why there are none."""

    ANSWERED = "answered"
    READ = "read"
    SIGNALLED = "signalled"
    STOPPED = "stopped"
    GONE = "gone"
    NO_ANSWER = "no answer"

    @property
    def has_stacks(self) -> bool:
        """Whether there are stacks."""
        return self in (Outcome.ANSWERED, Outcome.READ, Outcome.SIGNALLED)


@dataclass(frozen=True, slots=True)
class Frame:
    """A call under way; ``line`` is 0 when unknown."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread.

    Attributes:
        ident: As ``threading.get_ident()`` says.
        name: Empty when unknown.
        training: Whether it is the one that trains.
        own: Whether it is torchperfd's.
        frames: Innermost first.
    """

    ident: int
    name: str
    training: bool
    own: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a rank is in one process group, by torch's own record; collectives are counted from 1.

    Attributes:
        name: The same on all ranks of the group.
        description: Such as ``default_pg``; may be empty.
        begun: The newest that this rank has come to.
        number: The earliest that is not over; 0 when all are.
        call: Of that one, such as ``all_reduce``.
        sizes: Of its inputs, such as ``4x4, 10``.
    """

    name: str
    description: str
    begun: int
    number: int
    call: str
    sizes: str


@dataclass(frozen=True, slots=True)
class RankStacks:
    """All threads of one rank.

    Attributes:
        outcome: How they were obtained.
        reason: Why there are none, or why the rank did not answer itself.
        threads: Empty unless there are stacks.
        phase: Of the training thread; empty when unknown.
        step: Index of the training step in progress; None unless the rank has answered itself.
        step_seconds: Mean of recent training steps; 0 when there were none.
        seconds_since_step: Since the last training step ended; None when there was none.
        collectives: How far its process groups are; empty unless it stands still and torch keeps a record.
    """

    rank: int
    world_size: int
    node: str
    pid: int
    outcome: Outcome
    reason: str = ""
    threads: tuple[Thread, ...] = ()
    phase: str = ""
    step: int | None = None
    step_seconds: float = 0.0
    seconds_since_step: float | None = None
    collectives: tuple[GroupProgress, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether it has made a training step a moment ago."""
        since = self.seconds_since_step
        return since is not None and since < _RECENT_S + _RECENT_STEPS * self.step_seconds

    @property
    def training(self) -> Thread | None:
        """The thread that trains."""
        return next((thread for thread in self.threads if thread.training), None)


def tidy(threads: tuple[Thread, ...], package: str) -> tuple[Thread, ...]:
    """Mark the threads of torchperfd, and take its frames out of the others.

    Where one of its frames is the innermost it stays: then it is ours to explain what hangs. One that does
    nothing but call torch's C++ does not: it is that call in which the thread is.

    Args:
        threads: As the rank told them.
        package: Directory of the client's code, with a slash at its end; empty when unknown.
    """
    if not package:
        return threads
    return tuple(_tidied(thread, package) for thread in threads)


def _tidied(thread: Thread, package: str) -> Thread:
    frames = list(thread.frames)
    if _is_own(frames, package):
        return Thread(thread.ident, thread.name, thread.training, True, thread.frames)
    while len(frames) > 1 and frames[0].file in [f"{package}{name}" for name in _ONLY_CALLS_TORCH]:
        frames = frames[1:]
    inner = 0
    while inner < len(frames) and frames[inner].file.startswith(package):
        inner += 1
    kept = frames[:inner] + [frame for frame in frames[inner:] if not frame.file.startswith(package)]
    if len(kept) < len(thread.frames):
        # What `torchperfd run` was itself started by says nothing about the script.
        while kept and kept[-1].file == "<frozen runpy>":
            kept.pop()
    return Thread(thread.ident, thread.name, thread.training, False, tuple(kept or frames))


def _is_own(frames: list[Frame], package: str) -> bool:
    """Return whether a thread was started to run our code or our connection's: it begins there."""
    if not frames or frames[-1].function not in _THREADS_BEGIN_IN:
        return False
    starter = frames[-1].file
    first = next((frame for frame in reversed(frames) if frame.file != starter), None)
    return first is not None and (first.file.startswith(package) or first.file.endswith(_CONNECTION))
