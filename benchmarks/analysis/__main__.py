"""What the analyser costs, beside its peers and by the length of the trace.

    make bench-analysis
    python -m benchmarks.analysis --no-peers

Makes traces such as a GPU's and has each analyser load one, break its device time down, report how much
communication overlaps compute, and list its kernels. CPU is user plus system time of the whole process,
its start and imports included; memory is its peak. Of several interleaved rounds the cheapest counts, for
each analyser alike: what disturbs a round only ever adds. HTA, which takes a minute, has one round.
TraceLens is not compared: on PyPI that name belongs to another project. Exits 1 when a limit is broken.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.analysis import peers, synthetic
from benchmarks.judge import exit_code

EVENTS: Final = 200_000
COMPARED: Final = 1_000_000
LONG: Final = 2_000_000
LENGTHS: Final = (10_000, 31_623, 100_000, 316_228, 1_000_000, 3_162_278)
TIMES_CHEAPER: Final = 20.0
# Of what the fastest JSON library takes to decode five fields of each event.
MAX_PARSES: Final = 2.5
MAX_MIB: Final = 100.0
MAX_LONG_MIB: Final = 300.0
MAX_LONG_CPU_S: Final = 4.0
# Cost may differ from a straight line by this factor between the longest trace and a tenth of it.
MAX_BEND: Final = 1.25


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    peak_mib: float


def measure(python: Path, contestant: str, trace: Path) -> Cost:
    """Run a contestant on a trace.

    Raises:
        SystemExit: It failed.
    """
    script = Path(__file__).with_name("contestants.py")
    command = [str(python), str(script), contestant, str(trace)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{contestant} failed: {output.read().decode(errors='replace')[-1000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def rounds(contestants: dict[str, Path], trace: Path, count: int) -> dict[str, Cost]:
    """Run the contestants in turns; return the least CPU and the highest peak of each."""
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for _ in range(count):
        for name, python in contestants.items():
            costs[name].append(measure(python, name, trace))
    return {
        name: Cost(min(cost.cpu_s for cost in each), max(cost.peak_mib for cost in each))
        for name, each in costs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="only this project's own figures")
    options = parser.parse_args()
    ours = Path(sys.executable)
    peer: Path | None = None
    broken: list[str] = []
    if not options.no_peers:
        if why := peers.install(peers.HTA):
            broken.append(f"hta was not compared: {why}")
        else:
            peer = peers.PYTHON
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "rank0.json"
        costs = _compared(dict.fromkeys(("torchperfd", "everything"), ours), trace, EVENTS, options.rounds)
        mine = costs["torchperfd"]
        if mine.peak_mib > MAX_MIB:
            broken.append(f"{mine.peak_mib:.0f} MiB for {EVENTS:,} events, limit {MAX_MIB:.0f}")
        broken += _judge_peers(ours, peer, trace, options.rounds)
        broken += _judge_lengths(ours, trace, options.rounds)
    return exit_code(broken)


def _compared(contestants: dict[str, Path], trace: Path, events: int, count: int) -> dict[str, Cost]:
    """Print and return what each contestant takes for a trace of so many events."""
    synthetic.write(trace, events)
    print(f"{events:,} events, {trace.stat().st_size / 1e6:.1f} MB")
    costs = rounds(contestants, trace, count)
    for name, cost in costs.items():
        print(f"{name:<12} {cost.cpu_s:>8.2f} s CPU {cost.peak_mib:>8.0f} MiB", flush=True)
    return costs


def _judge_peers(ours: Path, peer: Path | None, trace: Path, count: int) -> list[str]:
    """Print the cost beside HTA and beside parsing alone; return which limits it breaks."""
    broken: list[str] = []
    costs = _compared(dict.fromkeys(("torchperfd", "msgspec"), ours), trace, COMPARED, count)
    mine = costs["torchperfd"].cpu_s
    parses = mine / costs["msgspec"].cpu_s
    print(f"{parses:.2f} times the CPU of msgspec's parse, limit {MAX_PARSES}")
    if parses > MAX_PARSES:
        broken.append(f"{parses:.2f} times the CPU of msgspec's parse")
    if peer is not None:
        times = _compared({"hta": peer}, trace, COMPARED, 1)["hta"].cpu_s / mine
        print(f"{times:.1f} times cheaper than hta, limit {TIMES_CHEAPER:.0f}")
        if times < TIMES_CHEAPER:
            broken.append(f"only {times:.1f} times cheaper than hta")
    return broken


def _judge_lengths(python: Path, trace: Path, count: int) -> list[str]:
    """Print the cost by length; return which limits it breaks."""
    broken: list[str] = []
    start = rounds({"torchperfd": python}, _short(trace), 2 * count)["torchperfd"].cpu_s
    per_event: dict[int, float] = {}
    print(f"{'events':>12} {'CPU s':>8} {'µs/event':>9} {'MiB':>6}   (µs an event: without the start)")
    for events in sorted({*LENGTHS, LONG}):
        synthetic.write(trace, events)
        cost = rounds({"torchperfd": python}, trace, count)["torchperfd"]
        per_event[events] = (cost.cpu_s - start) / events * 1e6
        print(f"{events:>12,} {cost.cpu_s:>8.2f} {per_event[events]:>9.2f} {cost.peak_mib:>6.0f}", flush=True)
        if events == LONG:
            whole = rounds({"everything": python}, trace, count)["everything"]
            print(f"{'everything':>12} {whole.cpu_s:>8.2f} {whole.peak_mib:>16.0f}", flush=True)
            if whole.cpu_s > MAX_LONG_CPU_S:
                broken.append(f"{whole.cpu_s:.2f} s CPU for {events:,} events, limit {MAX_LONG_CPU_S:.0f}")
        if events == LONG and cost.peak_mib > MAX_LONG_MIB:
            broken.append(f"{cost.peak_mib:.0f} MiB for {events:,} events, limit {MAX_LONG_MIB:.0f}")
    bend = per_event[LENGTHS[-1]] / per_event[LENGTHS[-3]]
    print(f"an event of the longest trace costs {bend:.2f} times one of a tenth of it, limit {MAX_BEND}")
    if bend > MAX_BEND:
        broken.append(f"cost is not linear: {bend:.2f}")
    return broken


def _short(trace: Path) -> Path:
    """Return a trace of next to nothing, whose cost is that of starting."""
    short = trace.with_name("short.json")
    synthetic.write(short, 10)
    return short


if __name__ == "__main__":
    sys.exit(main())
