"""Run a script or module as ``__main__``, exactly as Python would, and end as it would have ended.

A script ends by SIGTERM, with an exit code, or by an error.
"""

import builtins
import contextlib
import importlib.util
import io
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from torchperfd._version import NATIVE_ABI
from torchperfd.document.text import without_codes
from torchperfd.report.ending import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    TERMINATED,
    RankFailure,
    explain_error,
    first_failure,
)

if TYPE_CHECKING:
    from torchperfd.v1 import control_pb2


_OUR_CODE: Final = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: a file, or a module as with ``python -m``."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    @property
    def words(self) -> str:
        """It as a command takes it, quoted for a shell, without its arguments."""
        return shlex.join(self._target)

    @property
    def command(self) -> str:
        return shlex.join([*self._target, *self.arguments])

    @property
    def _target(self) -> list[str]:
        return ["-m", self.target] if self.is_module else [self.target]

    def execute(self) -> None:
        """Run it in this process and thread, as ``__main__``; whatever it raises comes out."""
        main = ModuleType("__main__")
        main.__builtins__ = builtins  # type: ignore[attr-defined]
        if self.is_module:
            # `python -m` puts the working directory first and finds the module from there. One that was
            # removed is left out.
            with contextlib.suppress(FileNotFoundError):
                _search_first(Path.cwd())
            sys.argv = ["-m", *self.arguments]
            spec = _module_spec(self.target)
            assert spec.loader is not None
            code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
            main.__file__ = spec.origin
            main.__spec__ = spec
            main.__package__ = spec.parent
            main.__loader__ = spec.loader
            main.__dict__["__cached__"] = spec.cached
            sys.argv = [str(spec.origin), *self.arguments]
        else:
            sys.argv = [self.target, *self.arguments]
            _search_first(Path(self.target).resolve().parent)
            # Absolute, as Python makes it: the script may change its directory.
            path = str(Path(self.target).absolute())
            main.__file__ = path
            main.__loader__ = SourceFileLoader("__main__", path)
            main.__spec__ = None
            code = _read_code(path)
        # Pickle and spawned workers look the script's functions up here, also after it has ended.
        sys.modules["__main__"] = main
        exec(code, main.__dict__)


def _search_first(directory: Path) -> None:
    # Where torchperfd was started from has been taken off the path (own_commands).
    if not sys.flags.safe_path:
        sys.path.insert(0, str(directory))


def _read_code(path: str) -> CodeType:
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _module_spec(name: str) -> ModuleSpec:
    """Return the spec that ``python -m name`` would run.

    Raises:
        ImportError: As runpy words it.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ImportError as error:
        raise ImportError(f"Error while finding module specification for {name!r} ({error})") from error
    if spec is not None and spec.submodule_search_locations is not None:
        return _module_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise ImportError(f"No module named {name}")
    return spec


def show(error: BaseException) -> None:
    """Print an exception that ended the script, as Python would have without us."""
    chain: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in chain:
            continue
        chain.add(id(current))
        current.__traceback__ = _without_us(current.__traceback__)
        pending += [current.__cause__, current.__context__]
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - a hook of the script's own is broken: Python prints both
        traceback.print_exc()


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback less the frames of this package."""
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OUR_CODE):
            kept.append(trace)
        trace = trace.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


try:
    from torchperfd.launch import _sigterm
except ImportError:  # nothing was compiled: SIGTERM ends the process at once
    _sigterm = None  # type: ignore[assignment]

HANDLES_SIGTERM: Final = getattr(_sigterm, "ABI", "") == NATIVE_ABI
MAX_TERMINATION_S: Final = 3.0
"""From SIGTERM to the end of the process."""


class Terminated(BaseException):
    """What has ended a script that SIGTERM ends; never raised."""


class TerminationWatch:
    """Waits for SIGTERM on a thread of its own, since the main thread may be stuck.

    Either that thread concludes the run or, where the script has ended before, the main thread. The script
    goes on meanwhile: a main thread that was stopped anywhere could hold a lock, such as that of imports.

    Args:
        conclude: Concludes the run; called on that thread.
    """

    def __init__(self, conclude: Callable[[], None]) -> None:
        self._conclude = conclude
        self._is_claimed = threading.Lock()
        self._is_concluded = threading.Event()
        self._is_installed = False

    def begin(self) -> None:
        self._is_installed = HANDLES_SIGTERM and _sigterm.install(MAX_TERMINATION_S)
        if self._is_installed:
            os.register_at_fork(after_in_child=_sigterm.release)
            threading.Thread(target=self._run, name="torchperfd-sigterm", daemon=True).start()

    def claim(self) -> None:
        """Have the main thread conclude the run; does not return if SIGTERM has come before."""
        if self._is_installed and not self._is_claimed.acquire(blocking=False):
            _sigterm.hold()

    def end(self) -> None:
        """Watch no longer; does not return if SIGTERM has come before."""
        self._is_concluded.set()
        if self._is_installed and _sigterm.release():
            _sigterm.hold()

    def _run(self) -> None:
        if not _sigterm.wait():
            return
        try:
            if self._is_claimed.acquire(blocking=False):
                self._conclude()
            else:
                self._is_concluded.wait(MAX_TERMINATION_S)
        except Exception as error:  # noqa: BLE001 - the process ends, whatever has happened
            sys.stderr.write(f"torchperfd: the report could not be made: {error}\n")
        finally:
            _sigterm.end()


_MAX_ERROR_CHARACTERS: Final = 200
_MAX_CHAINED_ERRORS: Final = 16
_SHARED_MEMORY: Final = "/dev/shm"


def exit_document(ended: BaseException | None) -> dict[str, Any]:
    """Return the state, exit code and error of a script's end, as a run's document has them.

    Args:
        ended: What the script raised; None where it reached its end.
    """
    if ended is None:
        return {"state": FINISHED, "code": 0}
    if isinstance(ended, SystemExit):
        if ended.code in (None, 0):
            return {"state": FINISHED, "code": 0}
        if isinstance(ended.code, int):
            return {"state": FAILED, "code": ended.code, "error": f"exit code {ended.code}"}
        return {"state": FAILED, "code": 1, "error": _first_line(ended.code)}
    if isinstance(ended, KeyboardInterrupt):
        return {"state": INTERRUPTED, "code": 130}
    if isinstance(ended, Terminated):
        return {"state": TERMINATED, "code": 143}
    return {"state": FAILED, "code": 1, "error": _error_words(ended)}


def failure_words(ended: BaseException | None) -> str:
    """Return the error of a script that has failed, in one line; empty if it has not."""
    document = exit_document(ended)
    return str(document.get("error") or FAILED) if document["state"] == FAILED else ""


def cause_elsewhere(answer: "control_pb2.GetRunResponse | None", own_rank: int) -> str:
    """Return which other rank's failure came first, in words; empty if none did.

    Args:
        answer: What the daemon knows of the run; None if no daemon has answered.
    """
    from torchperfd.v1 import session_pb2

    failures = []
    for rank in answer.ranks if answer is not None else ():
        steps = sum(k.steps for k in rank.account.kinds if k.kind == session_pb2.STEP_KIND_TRAIN)
        if rank.failure:
            number = rank.identity.rank
            failures.append(RankFailure(number, rank.failure, steps, rank.failed_unix_seconds))
    return first_failure(failures, own_rank)


def _error_words(error: BaseException) -> str:
    """Return an exception in one line, or that among its causes which shows why it came to it."""
    words = [_one_line(each) for each in _chain(error)]
    shared_memory = _shared_memory()
    explained = (explain_error(each, shared_memory) for each in words)
    return next((found for found, each in zip(explained, words, strict=True) if found != each), words[0])


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those that it was raised from or while handling, the last one first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain and len(chain) < _MAX_CHAINED_ERRORS:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _one_line(error: BaseException) -> str:
    message = _first_line(error)
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _first_line(error: object) -> str:
    text = ""
    # The script's own exception may have a broken __str__.
    with contextlib.suppress(Exception):
        text = without_codes(str(error))
    lines = (line.strip() for line in text.splitlines())
    return next((line[:_MAX_ERROR_CHARACTERS] for line in lines if line), "")


def _shared_memory() -> tuple[int, int] | None:
    """Return the size of the shared memory's file system and what of it is in use, in bytes."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bfree) * status.f_frsize
