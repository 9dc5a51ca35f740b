"""The tracer: torch's profiler, started without the seconds that its front door costs.

``torch.profiler.profile`` imports all of ``torch._inductor`` on its first start, just to
ask whether CUDA graphs are on: 1.4 to 2.7 s, on the training thread, or on another one in
a race with the script's own imports. A script that has not compiled anything has no
inductor graphs, so there the profiler beneath is used directly; it records the same.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def unusable() -> str:
    """Return why no trace can be started on this thread now, '' when one can."""
    if "torch" not in sys.modules:
        return "the process has not imported torch yet"
    from torch.autograd import profiler

    # Nested profilers rob each other of events, and two at once crash.
    if getattr(profiler, "_is_profiler_enabled", False):
        return "the script's own profiler is active; wait until it has stopped"
    return ""


class Tracer:
    """One trace. ``start`` and ``stop`` belong on the training thread, ``export`` on another.

    Args:
        record_shapes: Record the shapes of operator inputs.
        with_stack: Record Python stacks.
        profile_memory: Record allocations.
    """

    def __init__(self, *, record_shapes: bool, with_stack: bool, profile_memory: bool) -> None:
        import torch

        self._compiled = "torch._inductor" in sys.modules
        cuda = torch.cuda.is_available()
        self._profiler: Any
        if self._compiled:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profiler = profile(
                activities=activities,
                record_shapes=record_shapes,
                with_stack=with_stack,
                profile_memory=profile_memory,
            )
        else:
            from torch.autograd import profiler

            self._profiler = profiler.profile(
                use_device="cuda" if cuda else None,
                record_shapes=record_shapes,
                with_stack=with_stack,
                profile_memory=profile_memory,
                use_kineto=True,
            )

    def start(self) -> None:
        """Begin to record."""
        if self._compiled:
            self._profiler.start()
            return
        self._profiler.__enter__()
        _add_job_facts()

    def stop(self) -> None:
        """End recording; the trace is still in memory."""
        if self._compiled:
            self._profiler.stop()
        else:
            self._profiler.__exit__(None, None, None)

    def export(self, path: Path) -> None:
        """Write the trace as Chrome JSON. Possible once.

        Raises:
            OSError: It cannot be written.
        """
        self._profiler.export_chrome_trace(os.fspath(path))
        if not path.is_file():
            # Kineto reports a failed write on stderr only.
            raise OSError(f"torch wrote no trace to {path}")


def _add_job_facts() -> None:
    """Write the rank into the trace under the key that trace readers look for."""
    import torch

    distributed = sys.modules.get("torch.distributed")
    add = getattr(torch.autograd, "_add_metadata_json", None)
    if add is None or distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        facts = {
            "backend": distributed.get_backend(),
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
        }
        add("distributedInfo", json.dumps(facts))
