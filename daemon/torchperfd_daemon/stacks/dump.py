"""Parses the text of :mod:`faulthandler`: the stacks of a process that cannot run Python code."""

import re
from typing import Final

from torchperfd_daemon.stacks.model import Frame, Thread

# Since Python 3.14 a thread's name follows its ident.
_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-fA-F]{1,16})(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME: Final = re.compile(r"  File (?:\"(.*)\"|\?\?\?), line (\d{1,9}|\?\?\?) in (.*)")
_ESCAPE: Final = re.compile(r"\\(?:x([89a-f][0-9a-f])|u([0-9a-f]{4})|U(0010[0-9a-f]{4}|000[0-9a-f]{5}))")


def parse_dump(text: str, training: int) -> tuple[Thread, ...]:
    """Parse one dump of all threads, and skip lines of any other form.

    Args:
        text: The output of a handler of ``faulthandler.register``.
        training: The ident of the training thread. If no thread has it, the main thread is used, which Python
            lists last.
    """
    read: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if (thread := _THREAD.fullmatch(line)) is not None:
            read.append((int(thread[1], 16), thread[2] or "", []))
        elif read and (frame := _FRAME.fullmatch(line)) is not None:
            number = int(frame[2]) if frame[2].isdecimal() else 0
            file = "???" if frame[1] is None else _unescaped(frame[1])
            read[-1][2].append(Frame(file, number, _unescaped(frame[3])))
    if read and training not in (ident for ident, _, _ in read):
        training = read[-1][0]
    return tuple(Thread(ident, name, ident == training, False, tuple(frames)) for ident, name, frames in read)


def _unescaped(name: str) -> str:
    """Return a name with its characters beyond ASCII, which the handler writes as escapes."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[1] or escape[2] or escape[3], 16)), name)
