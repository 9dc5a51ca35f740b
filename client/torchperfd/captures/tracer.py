"""Tracers: torch's profiler, started without the seconds that its public constructor costs.

``torch.profiler.profile`` imports all of torch's inductor on its first start, just to ask whether CUDA graphs
are on: 1.4 to 2.7 s, on the training thread, or on another one in a race with the script's own imports. A
script that has not compiled anything has no inductor graphs, so there the profiler beneath is used directly;
it records the same.

Stopping and exporting hold the interpreter's lock inside torch, so that training pauses whichever thread they
run on. ``docs/captures.md`` has the cost.

CUPTI, through which Kineto records the device, is removed from the process when a capture ends. By default it
stays and slows down every launch for the rest of the run (docs/gpu-results.md).
"""

import contextlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from torchperfd.hooks.context import HookUnavailableError
from torchperfd.hooks.profiler import (
    ARBITER,
    add_metadata,
    is_inductor_imported,
    is_profiling,
    skip_event_lists,
    trace_only,
)
from torchperfd.model.capture_options import CaptureOptions

TEARDOWN_VARIABLE: Final = "TEARDOWN_CUPTI"
"""Read by Kineto whenever a profiler starts and stops, and on a thread of its own in between."""

_TEARDOWN_SAFE_FROM: Final = 13
"""Release of CUDA since which it was seen to work: five captures in a row, also with CUDA graphs, which older
releases crash with."""

_TEARDOWN_REST_S: Final = 1.0
"""Kineto removes CUPTI on a thread of its own, which races with a profiler that starts meanwhile."""

_ended_at = -_TEARDOWN_REST_S


def note_device_profiler_end() -> None:
    """A profiler of this process that has recorded a CUDA device has ended."""
    global _ended_at
    _ended_at = time.monotonic()


def rest_after_device_profiler() -> None:
    """Sleep until CUPTI may be used again; at most a second after the capture before."""
    time.sleep(max(0.0, _ended_at + _TEARDOWN_REST_S - time.monotonic()))


def have_cupti_removed(cuda: str | None) -> None:
    """Have CUPTI removed when a profiler ends, from now on, where that is known to be safe.

    The variable stays, because Kineto reads it also after the capture. A script's own choice is kept.

    Args:
        cuda: The release of CUDA that torch was built for, ``13.0``; None for other devices.
    """
    release = re.match(r"\d+", cuda or "")
    if release is not None and int(release[0]) >= _TEARDOWN_SAFE_FROM:
        os.environ.setdefault(TEARDOWN_VARIABLE, "1")


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
    """The script has started its own profiler, and ours has ended for it."""

    def __init__(self) -> None:
        super().__init__("the script started its own profiler; wait until it has stopped")


def unusable() -> str:
    """Return why no trace can be started on this thread now, '' when one can."""
    if "torch" not in sys.modules:
        return "the process has not imported torch yet"
    # Nested profilers rob each other of events, and two at once crash.
    if is_profiling():
        return "the script's own profiler is active; wait until it has stopped"
    if ARBITER.warming_up:
        return "the script's own profiler is warming up; wait until it has stopped"
    return ""


def prepare() -> str:
    """Watch which profilers start, from now until :func:`end`; return why no trace can be started, or ''.

    Torch must have been imported. Waits up to a second after a capture of a CUDA device.
    """
    rest_after_device_profiler()
    try:
        ARBITER.watch()
    except HookUnavailableError as error:
        return str(error)
    return unusable()


def end() -> None:
    """The capture is over: watch no longer."""
    ARBITER.leave()


def profiler_arguments(options: CaptureOptions) -> dict[str, Any]:
    """Return what torch's profilers are asked to record, by their own names."""
    asked = {
        "record_shapes": options.record_shapes,
        "with_stack": options.with_stack or options.with_modules,
        "profile_memory": options.profile_memory,
        "with_flops": options.with_flops,
    }
    # Torch deprecates it: a torch without it must still be able to capture.
    return {**asked, "with_modules": True} if options.with_modules else asked


class KinetoTracer:
    """A trace by torch's profiler.

    Args:
        unrecorded_step_ns: Duration of a step that nothing records, for readers of the trace; 0 if unknown.
        own_facts: What else the client knows of unrecorded steps, for the same key of the trace.
    """

    def __init__(
        self,
        options: CaptureOptions,
        unrecorded_step_ns: int = 0,
        own_facts: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        self.lost = False
        self._own_facts = {"unrecorded_step_ns": unrecorded_step_ns, **(own_facts or {})}
        self._thread = 0
        self._compiled = is_inductor_imported()
        self._cuda = cuda = torch.cuda.is_available()
        if cuda:
            have_cupti_removed(torch.version.cuda)
        arguments = profiler_arguments(options)
        if not arguments["with_stack"]:
            arguments["experimental_config"] = trace_only()
        self._profiler: Any
        if self._compiled:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profiler = profile(activities=activities, **arguments)
        else:
            from torch.autograd import profiler

            self._profiler = profiler.profile(
                use_device="cuda" if cuda else None, use_kineto=True, **arguments
            )

    def start(self) -> None:
        global _running
        with ARBITER.starting():
            if self._compiled:
                with warnings.catch_warnings():
                    # torch 2.11 warns a first profiler of what only a second cycle is in for.
                    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
                    self._profiler.start()
                skip_event_lists(self._profiler.profiler)
            else:
                self._profiler.__enter__()
                skip_event_lists(self._profiler)
                _add_job_facts()
            _add_own_facts(self._own_facts)
        self._thread = threading.get_ident()
        _watch_forks()
        _running = self
        ARBITER.begin(self._yield_to_user)

    def stop(self) -> None:
        """End recording; the trace is still in memory. Pauses all threads."""
        global _running
        if self.lost:
            return
        _running = None
        ARBITER.end()
        if self._compiled:
            self._profiler.stop()
        else:
            self._profiler.__exit__(None, None, None)
        if self._cuda:
            # Not before: stopping takes seconds where there are many events.
            note_device_profiler_end()

    def mute(self) -> None:
        """Record no further operators, without stopping; for a forked child, whose Kineto cannot be stopped.

        Raises:
            AttributeError: torch is too old for that.
        """
        from torch.profiler import ProfilerActivity

        self._profiler.toggle_collection_dynamic(False, {ProfilerActivity.CPU})

    def export(self, path: Path) -> None:
        """Write the trace as Chrome JSON, once. Pauses all threads.

        Raises:
            OSError: It cannot be written.
            LostTraceError: The script's own profiler has taken over.
        """
        if self.lost:
            raise LostTraceError
        try:
            self._profiler.export_chrome_trace(os.fspath(path))
        finally:
            self.discard()
        if not path.is_file():
            # Kineto reports a failed write on stderr only.
            raise OSError(f"torch wrote no trace to {path}")

    def discard(self) -> None:
        if self._compiled and self._profiler is not None:
            # It refers to itself. Until a collection it would keep the trace's memory, and the file that
            # could not be written.
            self._profiler.profiler = None
        self._profiler = None

    def _yield_to_user(self) -> bool:
        if threading.get_ident() != self._thread:
            return False  # a profiler of one thread can be stopped there only
        self.stop()
        self.lost = True
        return True


_running: KinetoTracer | None = None
"""The tracer whose profiler is on, if any."""


@cache
def _watch_forks() -> None:
    """Stop recording in forked children; registered once, since it cannot be taken back.

    A DataLoader worker forked during a capture would otherwise record into its memory until it exits.
    """

    def in_child() -> None:
        if _running is not None:
            # An older torch may lack it; a child must start in any case.
            with contextlib.suppress(Exception):
                _running.mute()

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
        add_metadata("distributedInfo", facts)


def _add_own_facts(facts: Mapping[str, Any]) -> None:
    """Write into the trace what the client knows of steps without the profiler: what that costs follows."""
    if facts["unrecorded_step_ns"]:
        add_metadata("torchperfd", facts)
