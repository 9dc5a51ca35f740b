"""Separates exceptions that the script raises while our code runs from our own failures.

Python runs a signal handler between two instructions of whatever code the main thread executes. A timeout, or
torch's "DataLoader worker died", may therefore be raised inside a hook of ours. It belongs to training and
must reach it. The same holds for exceptions that another thread or a debugger injects. :class:`Flag` is an
event that a handler may set or wait for in the middle of doing just that; ``threading.Event`` would deadlock.

Only its traceback shows where an exception comes from: Python calls a handler with the frame that it
interrupted, so the handler's frame has its own caller among its arguments. Trace functions get it as well.
"""

import contextlib
import inspect
import signal
import threading
from importlib import import_module
from queue import Empty, SimpleQueue
from types import CodeType, FrameType
from typing import Any, Final

PACKAGE: Final = __file__.rpartition("/safety/")[0] + "/"
"""The directory of this package's code; frames in it are ours."""
_OWN_TYPES: Final = frozenset({"builtins", "_queue", "queue", "struct", "torch", "torchperfd"})
"""Top-level modules whose exception types our own code can meet."""


def is_from_script(error: BaseException) -> bool:
    """Return whether the script raised an exception that was caught in code of ours.

    Call it on the thread that caught the exception, in an ``except`` clause around code of ours only. False
    means that our code failed, or something that it called.
    """
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit and their like are never ours
    others: list[FrameType] = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(PACKAGE):
            others.append(entry.tb_frame)
        entry = entry.tb_next
    if others:
        if any(_has_caller_as_argument(frame) for frame in others):
            return True
        handlers = _handlers()
        return any(frame.f_code in handlers for frame in others)
    # No other code ran: either our code failed, or the exception was injected.
    is_own_type = type(error).__module__.partition(".")[0] in _OWN_TYPES
    return error.__traceback__ is not None and not is_own_type


def _has_caller_as_argument(frame: FrameType) -> bool:
    caller = frame.f_back
    if caller is None:
        return False
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = frame.f_locals
    return any(_is_or_holds(values.get(name), caller) for name in code.co_varnames[:count])


def _is_or_holds(value: Any, frame: FrameType) -> bool:
    return value is frame or (type(value) is tuple and any(part is frame for part in value))


def _handlers() -> set[CodeType]:
    """Return the code of the signal handlers: one that deletes its arguments is recognised by it."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    found = (_code_of(handler) for handler in handlers if callable(handler))
    return {code for code in found if code is not None}


def _code_of(handler: Any) -> CodeType | None:
    for _ in range(4):  # a partial of a bound method of an object that is called
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            return code
        inner = getattr(handler, "func", None) or getattr(handler, "__func__", None)
        handler = inner if inner is not None else vars(type(handler)).get("__call__")
    return None


_IMPORT_S: Final = 10.0
"""How long an import may take, as of a directory on a network."""


def import_apart(*modules: str) -> None:
    """Import modules on a thread of its own, and wait for it.

    On this thread, a signal handler of the script that wants the same might interrupt the import, and find
    modules that are half there.
    """
    thread = threading.Thread(
        target=lambda: [*map(import_module, modules)], name="torchperfd-import", daemon=True
    )
    # As the interpreter ends, it starts no thread.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(_IMPORT_S)


class Flag:
    """Is set once, and stays set."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[SimpleQueue[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake up every thread that waits, and let no later one wait."""
        self._is_set = True
        for queue in tuple(self._waiting):
            queue.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for ``timeout`` seconds; return whether it is."""
        if self._is_set:
            return True
        queue: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(queue)
        try:
            if not self._is_set:
                queue.get(timeout=timeout)
        except Empty as error:
            if is_from_script(error):
                raise
        finally:
            self._waiting.remove(queue)
        return self._is_set
