"""The arbiter of torch's one profiler session: the user's profiler has priority over ours.

A profiler that the script starts while ours is on takes our events and ends ours. One that it has prepared (a
schedule's warm-up) is torn down by ours, and the process crashes when the script then starts it. So while a
capture runs, the two functions by which torch's profilers start are watched: ours is not started in a warm-
up, and ends first when the user's starts.

The number of autograd nodes that a thread has made gives the size of a step without recording anything.
"""

import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torchperfd.hooks.context import HookUnavailableError
from torchperfd.safety.interrupts import is_from_script
from torchperfd.safety.logs import log


def node_reader() -> Callable[[], int] | None:
    """Return what reads the calling thread's number; None if torch has none, or is not imported."""
    torch = sys.modules.get("torch")
    autograd = getattr(getattr(torch, "_C", None), "_autograd", None)
    read: Callable[[], int] | None = getattr(autograd, "_get_sequence_nr", None)
    return read


_PREPARE_PROFILER: Final = "_prepare_profiler"
_ENABLE_PROFILER: Final = "_enable_profiler"


class ProfilerArbiter:
    """Watches which profilers start.

    Attributes:
        warming_up: The script has prepared a profiler and has not started it yet.
    """

    def __init__(self) -> None:
        self.warming_up = False
        self._stop_ours: Callable[[], bool] | None = None
        self._starting_thread = 0
        self._pid = 0
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def watch(self) -> None:
        """Watch from now on; torch must have been imported.

        Raises:
            HookUnavailableError: This torch has no such functions.
        """
        from torch.autograd import profiler

        if self._wrapped:
            return
        missing = [name for name in (_PREPARE_PROFILER, _ENABLE_PROFILER) if not hasattr(profiler, name)]
        if missing:
            raise HookUnavailableError(
                f"this torch has no torch.autograd.profiler.{missing[0]}: a capture could not yield to a "
                "profiler that the script starts"
            )
        for name, wrap in ((_PREPARE_PROFILER, self._wrap_prepare), (_ENABLE_PROFILER, self._wrap_enable)):
            original = getattr(profiler, name)
            self._wrapped[name] = original, wrap(original)
            setattr(profiler, name, self._wrapped[name][1])
        self.warming_up = self.warming_up or _finds_warm_up()

    def leave(self) -> None:
        self.warming_up = False
        while self._wrapped:
            from torch.autograd import profiler

            name, (original, wrapper) = self._wrapped.popitem()
            # Another library may have wrapped it meanwhile; what is left of ours then does nothing.
            if getattr(profiler, name) is wrapper:
                setattr(profiler, name, original)

    @property
    def is_ours_on(self) -> bool:
        return self._stop_ours is not None or self._starting_thread != 0

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """What this thread starts within is ours."""
        self._starting_thread = threading.get_ident()
        try:
            yield
        finally:
            self._starting_thread = 0

    def begin(self, stop_ours: Callable[[], bool]) -> None:
        """Ours is on.

        Args:
            stop_ours: Called before the user's profiler starts, on the thread that starts it; ends
                ours and returns whether it did.
        """
        self._pid = os.getpid()
        self._stop_ours = stop_ours

    def end(self) -> None:
        """Ours is off."""
        self._stop_ours = None

    def _yield_to_user(self) -> bool:
        stop_ours = self._stop_ours
        # In a forked child ours is off already, and the thread that would end it is not there.
        if stop_ours is None or self._pid != os.getpid():
            return False
        try:
            return stop_ours()
        except Exception as error:  # the user's profiler must start whatever becomes of ours
            if is_from_script(error):
                raise
            log.exception("a capture did not end when the script started its own profiler")
            return False

    def _wrap_prepare(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_after_ours(*arguments: Any, **options: Any) -> Any:
            if self._starting_thread != threading.get_ident():
                self._yield_to_user()
                # Only while we watch: nothing else would take it back.
                self.warming_up = bool(self._wrapped)
            return prepare(*arguments, **options)

        return prepare_after_ours

    def _wrap_enable(self, enable: Callable[..., Any]) -> Callable[..., Any]:
        prepare, _ = self._wrapped[_PREPARE_PROFILER]

        def enable_after_ours(*arguments: Any, **options: Any) -> Any:
            if self._starting_thread == threading.get_ident():
                return enable(*arguments, **options)
            self.warming_up = False
            if not self._yield_to_user():
                return enable(*arguments, **options)
            # It was prepared before we watched, and ours has undone that; torch's flag, too.
            with self.starting():
                prepare(*arguments[:2])
            result = enable(*arguments, **options)
            from torch.autograd import profiler

            getattr(profiler, "_run_on_profiler_start", _do_nothing)()
            return result

        return enable_after_ours


ARBITER: Final = ProfilerArbiter()
"""The process has one profiler session, and so one of these."""


def is_profiling() -> bool:
    """Return whether a profiler is on, ours or the script's; torch must have been imported."""
    from torch.autograd import profiler

    return bool(getattr(profiler, "_is_profiler_enabled", False))


def is_inductor_imported() -> bool:
    """Return whether the script has imported torch's inductor, as it does to compile anything."""
    return "torch._inductor" in sys.modules


def add_metadata(key: str, facts: Mapping[str, Any]) -> None:
    """Write facts into the trace that is being recorded, as JSON; nothing where this torch cannot."""
    import torch

    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is not None:
        add(key, json.dumps(dict(facts)))


def trace_only() -> Any:
    """Return torch's setting to leave out what only ``events()`` needs, None if this torch has none."""
    import torch.profiler

    config = getattr(torch.profiler, "_ExperimentalConfig", None)
    try:
        return config(trace_only=True) if config is not None else None
    except TypeError:
        return None


def skip_event_lists(profiler: Any) -> None:
    """Let a profiler that has started make no Python list of its events when it stops.

    torch 2.4 always makes one, for about 50 us per event; what is exported does not come from it.

    Args:
        profiler: A ``torch.autograd.profiler.profile`` of our own.
    """
    profiler._parse_kineto_results = _no_events


def _no_events(*_: Any, **__: Any) -> list[Any]:
    return []


def _finds_warm_up() -> bool:
    """Return whether a profiler of the script's was warming up before we watched.

    The search takes some tens of milliseconds, so it is made only where the script has made a profiler.
    """
    from torch.autograd import profiler as autograd_profiler
    from torch.profiler import ProfilerAction, profile
    from torch.profiler.profiler import PROFILER_STEP_NAME

    tracker = getattr(autograd_profiler, "KinetoStepTracker", None)
    steps = getattr(tracker, "_step_dict", None)
    if steps is not None and PROFILER_STEP_NAME not in steps:
        return False
    # Every object refers to its class.
    holders = gc.get_referrers(profile, *profile.__subclasses__())
    return any(
        # By type: a proxy would be asked, and a dead one raises.
        issubclass(type(holder), profile) and getattr(holder, "current_action", None) is ProfilerAction.WARMUP
        for holder in holders
    )


def _do_nothing() -> None:
    return None
