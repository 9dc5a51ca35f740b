"""Parses the output of ``py-spy dump --json``."""

from typing import Final

import msgspec

from torchperfd_daemon.stacks.model import Frame, Thread

_IDENT_MASK: Final = 2**64 - 1
_MAX_LINES: Final = 2**31


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0


class _Thread(msgspec.Struct):
    thread_id: int
    frames: list[_Frame]
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
        threads = msgspec.json.decode(data, type=list[_Thread])
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
            tuple(map(_frame, thread.frames)),
        )
        for thread in threads
    )


def _frame(frame: _Frame) -> Frame:
    # Since Python 3.11 py-spy writes qualified names; a rank that answers itself reports plain ones.
    name = frame.name.rpartition(".")[2] or frame.name
    return Frame(frame.filename, frame.line if 0 <= frame.line < _MAX_LINES else 0, name)
