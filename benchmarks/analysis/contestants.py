"""What each analyser does with one trace: load, breakdown, overlap, kernel table.

    python contestants.py NAME TRACE

Each runs in the interpreter that has it, as a process of its own whose CPU and memory the benchmark
reads from the system; so nothing here is imported by the benchmark itself.
"""

import os
import sys
import tempfile
from pathlib import Path


def torchperfd(trace: Path) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from torchperfd_daemon.analysis import breakdown, loading

    device = breakdown.DeviceTime(loading.load(trace))
    total = device.all()
    print(total.idle_ns / 1000, total.comm_comp_overlap_pct, len(device.kernels()))


def everything(trace: Path) -> None:
    """Run all that ``torchperfd analyze`` works out, operator tables included."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from torchperfd_daemon import analysis

    print(len(analysis.summarise(analysis.load(trace)).operators))


def msgspec(trace: Path) -> None:
    """Decode the file into five fields of each event, as the fastest library does, and nothing else."""
    import msgspec as library

    event = library.defstruct(
        "event", [("ph", str), ("name", str, ""), ("cat", str, ""), ("ts", float, 0.0), ("dur", float, 0.0)]
    )
    whole = library.defstruct("whole", [("traceEvents", list[event])])  # type: ignore[valid-type]
    library.json.decode(trace.read_bytes(), type=whole)


def hta(trace: Path) -> None:
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as directory:
        analysis = TraceAnalysis(trace_files={0: str(trace)}, trace_dir=directory)
        idle = analysis.get_temporal_breakdown(visualize=False)["idle_time(us)"][0]
        overlap = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"][0]
        _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
        print(idle, overlap, len(kernels))


if __name__ == "__main__":
    {run.__name__: run for run in (torchperfd, everything, msgspec, hta)}[sys.argv[1]](
        Path(sys.argv[2]).resolve()
    )
