"""Tracers: torch's profiler, started and stopped without the seconds that its front door costs.

``torch.profiler.profile`` imports all of ``torch._inductor`` on its first start, just to
ask whether CUDA graphs are on: 1.4 to 2.7 s, on the training thread, or on another one in
a race with the script's own imports. A script that has not compiled anything has no
inductor graphs, so there the profiler beneath is used directly; it records the same.

There are two ways to end a trace. Torch's own holds the interpreter's lock all the while, so that
training stands still whichever thread it runs on. The other one is :mod:`torchperfd.libtorch`'s.
``docs/captures-cost.md`` has what each costs, and what else was tried.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from torchperfd import libtorch
from torchperfd.precedence import PRECEDENCE

_SETTLE_S: Final = 0.02
"""How long operators that are open at the last edge (an optimizer's step, say) have to end.

Torch would have an open one last until it is stopped; and on a thread that just leaves one it still
writes into what stopping frees.
"""


class Tracer(Protocol):
    """One trace. ``start`` and ``stop`` belong on the training thread, the rest on another."""

    @property
    def lost(self) -> bool:
        """Whether the script's own profiler has taken over."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> None:
        """End recording; the trace is still in memory."""

    def export(self, path: Path) -> None:
        """Write the trace as Chrome JSON, once, and forget it.

        Raises:
            OSError: It cannot be written.
            LostTraceError: The script's own profiler has taken over.
        """

    def discard(self) -> None:
        """Forget the trace."""


class LostTraceError(Exception):
    """The script has started its own profiler, and ours gave way."""

    def __init__(self) -> None:
        super().__init__("the script started its own profiler; wait until it has stopped")


def unusable() -> str:
    """Return why no trace can be started on this thread now, '' when one can."""
    if "torch" not in sys.modules:
        return "the process has not imported torch yet"
    from torch.autograd import profiler

    # Nested profilers rob each other of events, and two at once crash.
    if getattr(profiler, "_is_profiler_enabled", False):
        return "the script's own profiler is active; wait until it has stopped"
    if PRECEDENCE.warming_up:
        return "the script's own profiler is warming up; wait until it has stopped"
    return ""


def prepare() -> None:
    """Find out ahead of time what :func:`make` asks; torch must have been imported."""
    PRECEDENCE.watch()
    libtorch.load()


@dataclass(frozen=True, slots=True)
class Recorded:
    """What torch's profiler records beside operators; the names are its own.

    Attributes:
        record_shapes: The shapes of operator inputs.
        with_stack: Python stacks.
        profile_memory: Allocations.
        with_flops: What FLOPs are counted from: shapes and scalars of operator inputs. The count itself
            torch writes into no trace.
        with_modules: Which module runs. Of modules that TorchScript has not compiled, torch tells that
            among Python stacks only, so that these are recorded, too.
    """

    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    with_flops: bool = False
    with_modules: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's profilers."""
        arguments = {**asdict(self), "with_stack": self.with_stack or self.with_modules}
        if not self.with_modules:
            # Torch deprecates it: a torch without it must still be able to capture.
            del arguments["with_modules"]
        return arguments


def make(
    recorded: Recorded, unrecorded_step_ns: int = 0, own_facts: Mapping[str, Any] | None = None
) -> Tracer:
    """Return the tracer that holds training up least.

    Args:
        recorded: What is recorded.
        unrecorded_step_ns: What a step takes when nothing is, for who reads the trace; 0 when not known.
        own_facts: What else the client knows of unrecorded steps, for the same key of the trace.
    """
    library = libtorch.load()
    # Kineto's own daemon mode keeps a profiler of all threads, too, and there can be but one.
    if library is None or "KINETO_USE_DAEMON" in os.environ:
        return HandTracer(recorded, unrecorded_step_ns, own_facts)
    return OffLockTracer(library, recorded, unrecorded_step_ns, own_facts)


class HandTracer:
    """A trace by torch's own door, as a script would make it by hand.

    Args:
        recorded: What is recorded.
        unrecorded_step_ns: What a step takes when nothing is; 0 when not known.
        own_facts: What else the client knows of unrecorded steps.
    """

    def __init__(
        self, recorded: Recorded, unrecorded_step_ns: int = 0, own_facts: Mapping[str, Any] | None = None
    ) -> None:
        import torch

        self.lost = False
        self._own_facts = {"unrecorded_step_ns": unrecorded_step_ns, **(own_facts or {})}
        self._thread = 0
        self._compiled = "torch._inductor" in sys.modules
        cuda = torch.cuda.is_available()
        self._profiler: Any
        if self._compiled:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profiler = profile(activities=activities, **recorded.arguments())
        else:
            from torch.autograd import profiler

            self._profiler = profiler.profile(
                use_device="cuda" if cuda else None, use_kineto=True, **recorded.arguments()
            )

    def start(self) -> None:
        """Begin to record."""
        with PRECEDENCE.starting():
            if self._compiled:
                self._profiler.start()
            else:
                self._profiler.__enter__()
                _add_job_facts()
            _add_own_facts(self._own_facts)
        self._thread = threading.get_ident()
        PRECEDENCE.begin(self._give_way)

    def stop(self) -> None:
        """End recording; the trace is still in memory. Stalls all threads for about 2.5 us per event."""
        if self.lost:
            return
        PRECEDENCE.end()
        if self._compiled:
            self._profiler.stop()
        else:
            self._profiler.__exit__(None, None, None)

    def export(self, path: Path) -> None:
        """Write the trace as Chrome JSON, once. Stalls all threads for about 2 us per event.

        Raises:
            OSError: It cannot be written.
            LostTraceError: The script's own profiler has taken over.
        """
        if self.lost:
            raise LostTraceError
        self._profiler.export_chrome_trace(os.fspath(path))
        self.discard()
        if not path.is_file():
            # Kineto reports a failed write on stderr only.
            raise OSError(f"torch wrote no trace to {path}")

    def discard(self) -> None:
        """Forget the trace."""
        self._profiler = None

    def _give_way(self) -> bool:
        if threading.get_ident() != self._thread:
            return False  # a profiler of one thread can be stopped there only
        self.stop()
        self.lost = True
        return True


class OffLockTracer:
    """A trace that is stopped and written without the interpreter's lock.

    What is on all threads is recorded, and only the recording of operators ends at the step's edge,
    in 0.1 ms; Kineto is stopped by ``export``. Where memory is recorded, which torch does of one
    thread only, stopping stays on the training thread, and only the lock is let go.

    Args:
        library: The functions that do it.
        recorded: What is recorded.
        unrecorded_step_ns: What a step takes when nothing is; 0 when not known.
        own_facts: What else the client knows of unrecorded steps.
    """

    def __init__(
        self,
        library: libtorch.Libtorch,
        recorded: Recorded,
        unrecorded_step_ns: int = 0,
        own_facts: Mapping[str, Any] | None = None,
    ) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd import profiler

        self._library = library
        self._own_facts = {"unrecorded_step_ns": unrecorded_step_ns, **(own_facts or {})}
        self._everywhere = not recorded.profile_memory
        arguments = recorded.arguments()
        self._profiler: Any = profiler.profile(
            use_kineto=True,
            experimental_config=_ExperimentalConfig(
                # What only ``events()`` needs is left out; not possible with stacks.
                trace_only=not arguments["with_stack"],
                profile_all_threads=self._everywhere,
            ),
            **arguments,
        )
        self._recording: libtorch.Recording | None = None
        self._stopped = self._taken = False
        self.lost = False
        # Held while the profiler is being switched off: nobody else may touch it then.
        self._lock = threading.RLock()
        self._thread = 0

    def start(self) -> None:
        """Begin to record."""
        global _running
        with PRECEDENCE.starting():
            self._profiler.__enter__()
        self._thread = threading.get_ident()
        _watch_forks()
        _running = self
        PRECEDENCE.begin(self._give_way)
        _add_job_facts()
        _add_own_facts(self._own_facts)

    def stop(self) -> None:
        """End recording."""
        with self._lock:
            self._stopped = True
            if self.lost:
                return
            self._halt()
        if not self._everywhere:
            self._take()

    def export(self, path: Path) -> None:
        """Write the trace as Chrome JSON, once, and forget it. About 4 us of CPU time per event.

        Raises:
            OSError: It cannot be written.
            LostTraceError: The script's own profiler has taken over.
        """
        recording = self._pop()
        if recording is None:
            raise LostTraceError
        try:
            recording.save(path)
        finally:
            recording.free()

    def discard(self) -> None:
        """Forget the trace."""
        recording = self._pop()
        if recording is not None:
            recording.free()

    def _halt(self) -> None:
        global _running
        _running = None
        self._library.halt(everywhere=self._everywhere)

    def _take(self) -> None:
        from torch.autograd import profiler

        with self._lock:
            if self._taken:
                return
            self._taken = True
            self._recording = self._library.take(everywhere=self._everywhere)
            profiler._run_on_profiler_stop()  # type: ignore[no-untyped-call]
            PRECEDENCE.end()

    def _pop(self) -> libtorch.Recording | None:
        if not self._taken:
            time.sleep(_SETTLE_S)
        self._take()
        with self._lock:
            recording, self._recording = self._recording, None
        return recording

    def _give_way(self) -> bool:
        """The script starts its own profiler: end ours first, on the script's thread."""
        if not self._everywhere and threading.get_ident() != self._thread:
            return False  # a profiler of one thread can be stopped there only
        with self._lock:
            if not self._stopped:
                self.lost = True
                self._halt()
        if self.lost:
            self.discard()
        else:
            self._take()
        return True


_running: OffLockTracer | None = None
"""The tracer whose profiler is on, if any."""


@cache
def _watch_forks() -> None:
    """Make a forked child stop recording; registered once, since it cannot be taken back."""

    def in_child() -> None:
        if _running is not None:
            _running._halt()

    os.register_at_fork(after_in_child=in_child)


def _add_job_facts() -> None:
    """Write the rank into the trace under the key that trace readers look for."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        facts = {
            "backend": distributed.get_backend(),
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
        }
        _add("distributedInfo", facts)


def _add_own_facts(facts: Mapping[str, Any]) -> None:
    """Write into the trace what the client knows of steps without the profiler: what that costs follows."""
    if facts["unrecorded_step_ns"]:
        _add("torchperfd", dict(facts))


def _add(key: str, facts: dict[str, Any]) -> None:
    import torch

    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is not None:
        add(key, json.dumps(facts))
