"""The data of stacks: frames, threads and ranks, and how threads are read from text.

The text is that of :mod:`faulthandler`, for a process that cannot run Python code, or of
``py-spy dump --json``.
"""

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final

import msgspec

from torchperfd.model.messages import AtMost, Sentence
from torchperfd.model.process import GroupProgress
from torchperfd.model.source_lines import CALLING_FILES, WRAPPED_DRAWS_FILE

_CONNECTION: Final = "/grpc/_channel.py"
_RECENT_S: Final = 2.0
_RECENT_STEPS: Final = 3
_THREADS_BEGIN_IN: Final = ("_bootstrap", "_bootstrap_inner")


class Outcome(Enum):
    """The way in which a rank's stacks were obtained, or the reason why there are none."""

    ANSWERED = "answered"
    READ = "read"
    SIGNALLED = "signalled"
    STOPPED = "stopped"
    GONE = "gone"
    NO_ANSWER = "no answer"

    @property
    def has_stacks(self) -> bool:
        """Whether stacks were obtained."""
        return self in (Outcome.ANSWERED, Outcome.READ, Outcome.SIGNALLED)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack; ``line`` is 0 if unknown.

    Attributes:
        call: The name of what it calls; empty if unknown. Frames at the same line are the same.
    """

    file: Sentence
    line: int
    function: Sentence
    call: Sentence = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread.

    Attributes:
        ident: The thread's ``threading.get_ident()``.
        name: Empty if unknown.
        own: Whether it belongs to torchperfd.
        worker_pid: For the main thread of a DataLoader worker, the worker's process; 0 for other threads.
        worker: The worker's number in its loader; -1 if unknown.
    """

    ident: int
    name: Sentence
    training: bool
    own: bool
    frames: tuple[Frame, ...]
    worker_pid: int = 0
    worker: int = -1


def numbered(thread: Thread) -> Thread:
    """Return a thread as it was received, without a worker's number if it is of none."""
    return thread if thread.worker_pid else replace(thread, worker=-1)


@dataclass(frozen=True, slots=True)
class RankStacks:
    """All threads of one rank.

    Attributes:
        outcome: How the stacks were obtained.
        reason: Why there are none, or why the rank did not answer itself.
        threads: Empty without stacks.
        phase: The phase of the training thread; empty if unknown.
        step: Index of the training step in progress; None unless the rank has answered itself.
        step_seconds: Mean of recent training steps; 0 without any.
        seconds_since_step: Time since the last training step ended; None without any.
        collectives: The progress of its process groups; empty unless it has stalled and torch keeps a record.
    """

    rank: int
    world_size: int
    node: str
    pid: int
    outcome: Outcome
    reason: Sentence = ""
    threads: tuple[Annotated[Thread, numbered], ...] = ()
    phase: str = ""
    step: int | None = None
    step_seconds: float = 0.0
    seconds_since_step: float | None = None
    collectives: Annotated[tuple[GroupProgress, ...], AtMost(64)] = ()

    @property
    def goes_on(self) -> bool:
        """Whether it has made a training step recently."""
        since = self.seconds_since_step
        return since is not None and since < _RECENT_S + _RECENT_STEPS * self.step_seconds

    @property
    def training(self) -> Thread | None:
        """The training thread; None if unknown."""
        return next((thread for thread in self.threads if thread.training), None)


def tidy(threads: tuple[Thread, ...], package: str) -> tuple[Thread, ...]:
    """Mark the threads of torchperfd, and remove its frames from the other threads.

    Innermost frames of torchperfd are kept, since it may then cause the hang itself. An innermost frame that
    only calls torch's C++ code is removed: the thread is in that call.

    Args:
        package: Directory of the client's code, with a slash at its end; empty if unknown.
    """
    if not package:
        return threads
    return tuple(_tidied(thread, package) for thread in threads)


def _tidied(thread: Thread, package: str) -> Thread:
    frames = list(thread.frames)
    if _is_own(frames, package):
        return replace(thread, own=True)
    while len(frames) > 1 and frames[0].file in [f"{package}{name}" for name in CALLING_FILES]:
        frames = frames[1:]
    inner = 0
    while inner < len(frames) and frames[inner].file.startswith(package):
        inner += 1
    kept = frames[:inner] + [
        frame
        for frame in frames[inner:]
        if not frame.file.startswith(package) or frame.file.endswith(WRAPPED_DRAWS_FILE)
    ]
    if len(kept) < len(thread.frames):
        # These frames started `torchperfd run` and have no relation to the script.
        while kept and kept[-1].file == "<frozen runpy>":
            kept.pop()
    return replace(thread, own=False, frames=tuple(kept or frames))


def _is_own(frames: list[Frame], package: str) -> bool:
    """Return whether a thread begins in torchperfd's code or in that of its connection."""
    if not frames or frames[-1].function not in _THREADS_BEGIN_IN:
        return False
    starter = frames[-1].file
    first = next((frame for frame in reversed(frames) if frame.file != starter), None)
    return first is not None and (first.file.startswith(package) or first.file.endswith(_CONNECTION))


# Since Python 3.14 a thread's name follows its ident.
_DUMP_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-fA-F]{1,16})(?: \[(.*)\])? \(most recent call first\):"
)
_DUMP_FRAME: Final = re.compile(r"  File (?:\"(.*)\"|\?\?\?), line (\d{1,9}|\?\?\?) in (.*)")
_DUMP_ESCAPE: Final = re.compile(r"\\(?:x([89a-f][0-9a-f])|u([0-9a-f]{4})|U(0010[0-9a-f]{4}|000[0-9a-f]{5}))")


def parse_dump(text: str, training: int) -> tuple[Thread, ...]:
    """Parse one dump of all threads, and skip lines of any other form.

    Args:
        text: The output of a handler of ``faulthandler.register``.
        training: The ident of the training thread. If no thread has it, the main thread is used, which Python
            lists last.
    """
    read: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if (thread := _DUMP_THREAD.fullmatch(line)) is not None:
            read.append((int(thread[1], 16), thread[2] or "", []))
        elif read and (frame := _DUMP_FRAME.fullmatch(line)) is not None:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            file = "???" if frame[1] is None else _unescaped(frame[1])
            read[-1][2].append(Frame(file, number, _unescaped(frame[3])))
    if read and training not in (ident for ident, _, _ in read):
        training = read[-1][0]
    return tuple(Thread(ident, name, ident == training, False, tuple(frames)) for ident, name, frames in read)


def _unescaped(name: str) -> str:
    """Return a name with its characters beyond ASCII, which the handler writes as escapes."""
    return _DUMP_ESCAPE.sub(lambda escape: chr(int(escape[1] or escape[2] or escape[3], 16)), name)


_IDENT_MASK: Final = 2**64 - 1
_MAX_LINES: Final = 2**31


class _PySpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0


class _PySpyThread(msgspec.Struct):
    thread_id: int
    frames: list[_PySpyFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None


def parse_py_spy(data: bytes, pid: int, training: int) -> tuple[Thread, ...]:
    """Parse the stacks of one process.

    Args:
        training: The ident of the training thread. If no thread has it, the main thread is used.

    Raises:
        ValueError: The data has another form.
    """
    try:
        threads = msgspec.json.decode(data, type=list[_PySpyThread])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if training not in (thread.thread_id for thread in threads):
        training = next((thread.thread_id for thread in threads if thread.os_thread_id == pid), 0)
    return tuple(
        Thread(
            thread.thread_id & _IDENT_MASK,
            thread.thread_name or "",
            thread.thread_id == training,
            False,
            tuple(map(_py_spy_frame, thread.frames)),
        )
        for thread in threads
    )


def _py_spy_frame(frame: _PySpyFrame) -> Frame:
    # Since Python 3.11 py-spy writes qualified names; a rank that answers itself reports plain ones.
    name = frame.name.rpartition(".")[2] or frame.name
    return Frame(frame.filename, frame.line if 0 <= frame.line < _MAX_LINES else 0, name)
