"""Run a script or module as ``__main__``, exactly as Python would."""

import builtins
import contextlib
import importlib.util
import io
import os
import shlex
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Final

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
        """It with its arguments, quoted for a shell."""
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
