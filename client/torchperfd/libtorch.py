"""libtorch: torch's profiler stopped and saved without holding the interpreter's lock.

``_disable_profiler`` and ``_ProfilerResult.save`` of ``torch._C`` keep the lock for as long as they
work, about 4 us per event, so that no Python runs meanwhile on any thread. The C++ functions behind
them need no Python: Kineto's own daemon mode calls them from a thread that the interpreter does not
know. They are called here through ctypes, which lets go of the lock.

They are no promised interface, and a C++ exception that leaves them ends the process. So they
are used on the releases, builds and processors only on which the tests of this module have run, which
are those for the CPU alone, and never unless the profiler is in the state that they insist on.
"""

import contextlib
import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

_RELEASES: Final = ((2, 13),)
_PROCESSORS: Final = ("x86_64",)

_STRING: Final = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_STATE: Final = "_ZN5torch8profiler4impl17ProfilerStateBase3getEb"
_REMOVE_CALLBACK: Final = "_ZN5torch8profiler4impl17ProfilerStateBase14removeCallbackEv"
_DISABLE: Final = "_ZN5torch8autograd8profiler15disableProfilerEv"
_SAVE: Final = f"_ZN5torch8autograd8profiler14ProfilerResult4saveERK{_STRING}"
_DESTROY: Final = "_ZN5torch8autograd8profiler14ProfilerResultD1Ev"
_DELETE: Final = "_ZdlPv"


class _Owner(ctypes.Structure):
    """Where a ``std::unique_ptr`` is returned to.

    It comes back through memory that the caller provides. Only the first word is written;
    the others make ctypes see that this is too large for registers.
    """

    _fields_ = (("pointer", ctypes.c_void_p), ("_unused", ctypes.c_void_p * 2))


class _String(ctypes.Structure):
    """A ``std::string`` to read from, as libstdc++ lays it out; the characters are Python's."""

    _fields_ = (
        ("characters", ctypes.c_char_p),
        ("length", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t),
        ("_unused", ctypes.c_size_t),
    )


class Libtorch:
    """The profiler's functions in one loaded ``libtorch_cpu``.

    Args:
        path: The library's file.

    Raises:
        OSError: It cannot be loaded.
        AttributeError: It lacks one of the functions.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(os.fspath(path))
        self._get = _function(library, _STATE, ctypes.c_void_p, ctypes.c_bool)
        self._remove_callback = _function(library, _REMOVE_CALLBACK, None, ctypes.c_void_p)
        self._disable = _function(library, _DISABLE, _Owner)
        self._save = _function(library, _SAVE, None, ctypes.c_void_p, ctypes.POINTER(_String))
        self._destroy = _function(library, _DESTROY, None, ctypes.c_void_p)
        self._delete = _function(library, _DELETE, None, ctypes.c_void_p)

    def halt(self, *, everywhere: bool) -> bool:
        """Record no further operators; return whether a profiler was on. Takes about 0.1 ms.

        Args:
            everywhere: Mean the profiler of all threads, not that of this one.
        """
        state = self._get(everywhere)
        if state:
            self._remove_callback(state)
        return bool(state)

    def take(self, *, everywhere: bool) -> "Recording | None":
        """Switch the profiler off and return what it has recorded; None when none was on.

        About 2 us per event. The profiler of all threads may be taken on any thread, that of one
        thread on that only.
        """
        # It would throw.
        if not self._get(everywhere):
            return None
        return Recording(self, self._disable().pointer)

    def save(self, pointer: int, path: Path) -> None:
        """Write a ``ProfilerResult`` as Chrome JSON; possible once. About 1.5 us per event."""
        name = os.fsencode(path)
        self._save(pointer, ctypes.byref(_String(name, len(name), len(name), 0)))

    def free(self, pointer: int) -> None:
        """Destroy a ``ProfilerResult``. About 0.5 us per event."""
        self._destroy(pointer)
        self._delete(pointer)


class Recording:
    """What a profiler has recorded: memory of libtorch's, owned by this object."""

    def __init__(self, libtorch: Libtorch, pointer: int) -> None:
        self._libtorch = libtorch
        self._pointer = pointer

    def save(self, path: Path) -> None:
        """Write it as Chrome JSON. Possible once.

        Raises:
            OSError: It cannot be written.
        """
        self._libtorch.save(self._pointer, path)
        if not path.is_file():
            # Kineto reports a failed write on stderr only.
            raise OSError(f"torch wrote no trace to {path}")

    def free(self) -> None:
        """Give the memory back; the recording must not be used any more."""
        self._libtorch.free(self._pointer)


@cache
def load() -> Libtorch | None:
    """Return the functions, None where they are not known to be what they are taken for.

    Call it once torch has been imported.
    """
    torch = sys.modules["torch"]
    release = tuple(int(part) for part in str(torch.__version__).split(".")[:2] if part.isdigit())
    if release not in _RELEASES or platform.machine() not in _PROCESSORS or sys.platform != "linux":
        return None
    if torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None):
        return None
    with contextlib.suppress(OSError, AttributeError):
        return Libtorch(Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so")
    return None


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    # An object of its own, as two readers of one library might want it otherwise.
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function
