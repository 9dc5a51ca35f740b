"""Measure what stopping, writing and freeing a trace cost per event, for each thing that it may record.

    python -m benchmarks.capture.pause

Training pauses for that long at a capture's end, since torch holds the interpreter's lock. The figures are
CPU time, so that other processes on the machine do not change them: the least of five captures of 40 steps.
``torchperfd.pause_estimate`` has its constants from the last column.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.capture.worker import Loop
from torch.autograd import profiler

from torchperfd.captures import tracer
from torchperfd.model.capture_options import CaptureOptions

STEPS: Final = 40
ROUNDS: Final = 5
RECORDED: Final = {
    "operators": CaptureOptions(),
    "+ shapes": CaptureOptions(record_shapes=True),
    "+ FLOPs": CaptureOptions(with_flops=True),
    "+ stacks": CaptureOptions(with_stack=True),
    "+ memory": CaptureOptions(profile_memory=True),
    "+ all of these": CaptureOptions(
        record_shapes=True, with_stack=True, profile_memory=True, with_flops=True
    ),
}


def costs(loop: Loop, recorded: CaptureOptions, path: Path) -> tuple[float, float, float]:
    """Capture once; return the CPU seconds of stopping, of writing and freeing, and the number of events."""
    tracing = tracer.KinetoTracer(recorded)
    tracing.start()
    for step in range(STEPS):
        annotation: Any = profiler.record_function(f"ProfilerStep#{step}")
        with annotation:
            loop.step()
    began = time.process_time()
    tracing.stop()
    stopped = time.process_time()
    tracing.export(path)
    return stopped - began, time.process_time() - stopped, len(json.loads(path.read_bytes())["traceEvents"])


def main() -> None:
    torch.set_num_threads(1)
    loop = Loop()
    loop.quiet()
    print(f"torch {torch.__version__}")
    print(f"{'recorded':16} events/step  stop us/event  export us/event  pause ms/step")
    with tempfile.TemporaryDirectory() as folder:
        for name, recorded in RECORDED.items():
            found = [costs(loop, recorded, Path(folder, "trace.json")) for _ in range(ROUNDS)]
            stop, export, events = min(found, key=lambda each: each[0] + each[1])
            print(
                f"{name:16} {events / STEPS:11,.0f} {stop / events * 1e6:14.1f} {export / events * 1e6:16.1f}"
                f" {(stop + export) / STEPS * 1e3:14.1f}"
            )


if __name__ == "__main__":
    main()
