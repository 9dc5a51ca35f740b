"""Measure what a capture costs the training that it captures, and judge it.

    make bench-capture
    python -m benchmarks.capture --rounds 1 --captures 20

Three measurements:

- each way out of the profiler, alternating, in processes of its own: how much longer the step is in which
  a capture starts, and the longest step from its end until the trace is on disk. A capture has
  40 steps of about 1,000 events each;
- many captures of one process: memory, and the steps before and after each;
- captures ordered through a real daemon: from the request to the ranks' agreement on the steps.

Exits 1 when a capture's start takes more than 5 ms of the training thread (medians, of the first
captures of a process and of all), when the longest step at its end is more than 1.25 times that of
torch's own by hand, when steps are more than 1 % longer afterwards, when memory grows by more than 20 MiB
from the fifth capture to the last, or when more than one in a hundred requests takes over 100 ms.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import grpc
from benchmarks.capture.ways import WAYS
from benchmarks.judge import exit_code
from tests.support.node import Node, eventually

from torchperfd.v1 import control_pb2, control_pb2_grpc, session_pb2

STEPS: Final = 40
CAPTURES_PER_PROCESS: Final = 3
OURS: Final = "torchperfd"
THEIRS: Final = "by hand"

MAX_START_MS: Final = 5.0
MOST_OF_THEIRS: Final = 1.25
MAX_SLOWER: Final = 1.01
MAX_GROWTH_MIB: Final = 20.0
MAX_ARMED_S: Final = 0.1
SETTLED: Final = 5
"""Captures after which memory is expected to stay."""

Costs = list[dict[str, float]]


def captured(way: str, captures: int) -> Costs:
    """Return what each capture of a fresh process costs."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.capture.worker", way, str(captures), str(STEPS), directory],
            env={**os.environ, "TORCHPERFD_SOCKET": f"{directory}/absent.sock"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{way}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def beside_the_others(rounds: int) -> list[str]:
    """Measure all ways, taking turns; print the table; return what is wrong."""
    first: dict[str, Costs] = {way: [] for way in WAYS}
    costs: dict[str, Costs] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found = captured(way, CAPTURES_PER_PROCESS)
            first[way].append(found[0])
            costs[way] += found
    theirs = statistics.median(cost["end"] for cost in costs[THEIRS])
    print(f"{'':16}   events  first start  start, worst  end, worst     of by hand  written in")
    ends = {}
    for way, found in costs.items():
        ends[way] = statistics.median(cost["end"] for cost in found)
        starts = [cost["start"] for cost in found]
        print(
            f"{way:16} {found[0]['events']:8,.0f}"
            f" {statistics.median(cost['start'] for cost in first[way]):9.1f} ms"
            f" {statistics.median(starts):4.1f} {max(starts):5.1f} ms"
            f" {ends[way]:5.0f} {max(cost['end'] for cost in found):5.0f} ms"
            f" {ends[way] / theirs:7.2f}"
            f" {statistics.median(max(cost['exporting'], cost['end']) for cost in found):9.0f} ms"
        )
    wrong = []
    for name, found in (("first captures", first[OURS]), ("captures", costs[OURS])):
        start = statistics.median(cost["start"] for cost in found)
        if start > MAX_START_MS:
            wrong.append(f"{name} start in {start:.1f} ms, limit {MAX_START_MS:.0f} ms")
    if ends[OURS] > MOST_OF_THEIRS * theirs:
        wrong.append(f"captures end in {ends[OURS]:.0f} ms, limit {MOST_OF_THEIRS * theirs:.0f} ms")
    return wrong


def again_and_again(captures: int) -> list[str]:
    """Capture one process many times; return what is wrong."""
    costs = captured(OURS, captures)
    slower = statistics.median(cost["after"] / cost["usual"] for cost in costs)
    first, settled, last = (costs[at]["resident"] for at in (0, min(SETTLED, captures) - 1, -1))
    print(f"steps after a capture take {slower:.3f} times as long as before (median of {captures})")
    print(
        f"memory: {first:.0f} MiB after the first capture, {settled:.0f} after number {SETTLED},"
        f" {last:.0f} after number {captures}"
    )
    wrong = []
    if slower > MAX_SLOWER:
        wrong.append(f"steps are {slower:.3f} times as long afterwards, limit {MAX_SLOWER}")
    if last - settled > MAX_GROWTH_MIB:
        wrong.append(f"memory grew by {last - settled:.0f} MiB, limit {MAX_GROWTH_MIB:.0f} MiB")
    return wrong


def armed_seconds(requests: int) -> list[float]:
    """Return how long each of many requests through a daemon takes to be agreed upon."""
    node = Node()
    try:
        node.start_daemon()
        with (
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.capture.job"],
                env=node.env,
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            ) as job,
            grpc.insecure_channel(f"unix:{node.socket}") as channel,
        ):
            try:
                eventually(lambda: (node.metric("torchperfd_train_steps_total{") or 0) > 100, 60, node.log)
                control = control_pb2_grpc.ControlStub(channel)
                return [_armed(control) for _ in range(requests)]
            finally:
                job.kill()
    finally:
        node.close()


def _armed(control: control_pb2_grpc.ControlStub) -> float:
    request = control_pb2.CaptureRequest(options=session_pb2.CaptureOptions(steps=1), timeout_seconds=30)
    began = time.monotonic()
    armed = 0.0
    for progress in control.Capture(request):
        if progress.state == control_pb2.CAPTURE_STATE_ARMED and not armed:
            armed = time.monotonic() - began
    if progress.state != control_pb2.CAPTURE_STATE_COMPLETE:
        sys.exit(f"a capture ended with {progress.reason}")
    return armed


def through_the_daemon(requests: int) -> list[str]:
    """Order captures; return what is wrong."""
    seconds = sorted(armed_seconds(requests))
    late = seconds[-1 - len(seconds) // 100]
    print(
        f"request to armed: median {statistics.median(seconds) * 1e3:.0f} ms, 99 % {late * 1e3:.0f} ms,"
        f" worst {seconds[-1] * 1e3:.0f} ms of {requests}"
    )
    return [f"99 % are armed in {late * 1e3:.0f} ms, limit 100 ms"] if late > MAX_ARMED_S else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each way")
    parser.add_argument("--captures", type=int, default=100, help="captures of one process, and requests")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {_load()} before the start")
    wrong = beside_the_others(options.rounds)
    wrong += again_and_again(options.captures)
    wrong += through_the_daemon(options.captures)
    print(f"load {_load()} at the end")
    return exit_code(wrong)


def _load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


if __name__ == "__main__":
    sys.exit(main())
