"""Measure the daemon and judge it.

    make bench-daemon
    python -m benchmarks.daemon --seconds 30

Four measurements, each on a daemon of its own, all with eight GPUs of a fake driver:

- at 1 Hz with eight ranks of ten steps a second, which report as often as clients do (or as
  `--reports` says), scraped every 5 s: CPU and memory;
- scrapes of it and of prometheus-node-exporter in turn: CPU per scrape and series;
- ranks that send steps as fast as they are taken: steps per CPU second of the daemon;
- samples at 10 Hz: whether they keep to their grid.

Exits 1 when the daemon takes more than 1 % of a core or 60 MiB, more than twice the exporter's
time per series, takes fewer than 100,000 steps in a second of CPU, or drifts by more than 20 ms.
"""

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.daemon.rank import WORLD
from benchmarks.daemon.watch import MIB, cpu_seconds, resident_bytes, watch
from benchmarks.judge import exit_code
from tests.fakes.nvml import Driver, gpu, scenario
from tests.support.node import ROOT, Node, eventually, free_port

GPUS: Final = 8
STEPS_PER_SECOND: Final = 10
REPORTS_PER_SECOND: Final = 1
"""As clients do: of each, a batch of steps and an account."""

MAX_CORES: Final = 0.01
MAX_BYTES: Final = 60 * MIB
MAX_TIMES_EXPORTER: Final = 2.0
MIN_STEPS_PER_CPU_SECOND: Final = 100_000
MAX_DRIFT_S: Final = 0.02

EXPORTER: Final = "prometheus-node-exporter"
SCRAPE_INTERVAL_S: Final = 5.0
SCRAPES: Final = 100
# A page is good for nine times what it took to render: only a slower scraper is served a new one.
SCRAPE_PACE_S: Final = 0.25
FLOODS: Final = 2
FLOOD_S: Final = 6.0
FAST_INTERVAL_S: Final = 0.1
SETTLE_S: Final = 5.0

# What Prometheus sends.
_HEADERS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
_LAST: Final = re.compile(r'collector_last_success_timestamp_seconds\{collector="(\w+)"\} (\S+)')


def fetch(port: int, headers: dict[str, str]) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
        return body


def series(port: int) -> int:
    return sum(not line.startswith(b"#") for line in fetch(port, {}).splitlines())


@contextlib.contextmanager
def daemon(*options: str) -> Iterator[Node]:
    """Run a daemon on a node with eight GPUs."""
    node = Node()
    try:
        driver = Driver(node.directory, scenario(*(gpu(index) for index in range(GPUS))))
        node.env |= driver.env
        node.start_daemon(*options)
        yield node
    finally:
        node.close()


@contextlib.contextmanager
def ranks(node: Node, count: int, *arguments: str) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run ranks that stream to a node's daemon; ends them."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.daemon.rank", str(node.socket), str(rank), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "client", ROOT)))},
        )
        for rank in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"welcome\n", "a rank could not connect"
        yield started
    finally:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
            process.kill()
            process.wait()


@contextlib.contextmanager
def scraped(node: Node) -> Iterator[None]:
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_INTERVAL_S):
            fetch(node.metrics_port, _HEADERS)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def at_rest(node: Node, seconds: float) -> list[str]:
    """Measure CPU and memory of a daemon with its ranks; return what is wrong."""
    pid = pid_of(node)
    with scraped(node):
        time.sleep(SETTLE_S)
        cost = watch(pid, seconds)
    print(
        f"at 1 Hz with {GPUS} GPUs and {WORLD} ranks, {cost.seconds:.0f} s:"
        f" {cost.cores:.2%} of a core, {cost.peak_bytes / MIB:.1f} MiB,"
        f" {series(node.metrics_port)} series"
    )
    wrong = []
    if cost.cores > MAX_CORES:
        wrong.append(f"{cost.cores:.2%} of a core, limit {MAX_CORES:.0%}")
    if cost.peak_bytes > MAX_BYTES:
        wrong.append(f"{cost.peak_bytes / MIB:.1f} MiB, limit {MAX_BYTES / MIB:.0f} MiB")
    return wrong


def beside_the_exporter(node: Node) -> list[str]:
    """Scrape the daemon and the exporter in turn; return what is wrong."""
    if shutil.which(EXPORTER) is None:
        print(f"{EXPORTER} is not installed: not compared")
        return []
    port = free_port()
    with subprocess.Popen(
        [EXPORTER, f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as exporter:
        try:
            eventually(lambda: _listens(port), 20)
            targets = {"torchperfd": (node.metrics_port, pid_of(node)), EXPORTER: (port, exporter.pid)}
            per_series = {}
            idle = {name: watch(pid, SETTLE_S).cores for name, (_, pid) in targets.items()}
            for _ in range(5):
                for target, _ in targets.values():
                    fetch(target, _HEADERS)
                    time.sleep(SCRAPE_PACE_S)
            costs: dict[str, list[float]] = {name: [] for name in targets}
            for _ in range(SCRAPES):
                for name, (target, pid) in targets.items():
                    began, cpu = time.monotonic(), cpu_seconds(pid)
                    fetch(target, _HEADERS)
                    time.sleep(SCRAPE_PACE_S)
                    spent, elapsed = cpu_seconds(pid) - cpu, time.monotonic() - began
                    costs[name].append(spent - idle[name] * elapsed)
            for name, (target, _) in targets.items():
                mean = statistics.mean(costs[name])
                count = series(target)
                per_series[name] = mean / count
                print(
                    f"a scrape of {name}: {mean * 1e3:.2f} ms, {count} series,"
                    f" {mean / count * 1e6:.2f} us each"
                )
        finally:
            exporter.terminate()
    times = per_series["torchperfd"] / per_series[EXPORTER]
    print(f"per series {times:.2f} times the exporter's")
    return (
        [f"{times:.2f} times the exporter's, limit {MAX_TIMES_EXPORTER:.0f}"]
        if times > MAX_TIMES_EXPORTER
        else []
    )


def flooded() -> list[str]:
    """Feed steps as fast as they are taken; return what is wrong."""
    with daemon() as node:
        pid = pid_of(node)
        with ranks(node, FLOODS, "--flood", str(FLOOD_S)):
            time.sleep(1)
            before, cpu, began = _ingested(node), cpu_seconds(pid), time.monotonic()
            time.sleep(FLOOD_S - 2)
            steps = _ingested(node) - before
            spent, elapsed = cpu_seconds(pid) - cpu, time.monotonic() - began
        print(
            f"flooded: {steps / elapsed:,.0f} steps/s at {spent / elapsed:.0%} of a core,"
            f" {steps / spent:,.0f} steps per CPU second, {resident_bytes(pid) / MIB:.1f} MiB"
        )
    if steps / spent < MIN_STEPS_PER_CPU_SECOND:
        return [f"{steps / spent:,.0f} steps per CPU second, limit {MIN_STEPS_PER_CPU_SECOND:,}"]
    return []


def on_the_grid(seconds: float, *pace: str) -> list[str]:
    """Sample at 10 Hz and compare where the first and the last samples lie on the grid."""
    with daemon("--interval", str(FAST_INTERVAL_S)) as node:
        time.sleep(SETTLE_S)
        phases: dict[str, list[float]] = {}
        until = time.monotonic() + seconds
        with ranks(node, WORLD, *pace):
            pid = pid_of(node)
            began, cpu = time.monotonic(), cpu_seconds(pid)
            while time.monotonic() < until:
                time.sleep(0.5)
                for name, moment in _LAST.findall(fetch(node.metrics_port, {}).decode()):
                    phases.setdefault(name, []).append(float(moment))
            cores = (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
    wrong = []
    print(f"at 10 Hz: {cores:.2%} of a core, scraped twice a second")
    for name, moments in phases.items():
        if name == "ownership":
            continue  # has a slower pace of its own
        # Circular: from the first moment, the nearest point of the grid may lie on either side.
        offsets = [
            (moment - moments[0] + FAST_INTERVAL_S / 2) % FAST_INTERVAL_S - FAST_INTERVAL_S / 2
            for moment in moments
        ]
        quarter = max(1, len(offsets) // 4)
        drift = statistics.median(offsets[-quarter:]) - statistics.median(offsets[:quarter])
        print(f"  {name}: drifted by {drift * 1e3:+.1f} ms in {moments[-1] - moments[0]:.0f} s")
        if abs(drift) > MAX_DRIFT_S:
            wrong.append(f"{name} drifted by {drift * 1e3:+.1f} ms, limit {MAX_DRIFT_S * 1e3:.0f} ms")
    return wrong


def wake_up_seconds() -> float:
    """Return the CPU time of one wake-up of a process that does nothing else.

    A few hundredths of a millisecond on metal, a hundred times that on some virtual machines: then
    most of what an idle daemon costs is the machine's.
    """
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.05)"]) as sleeper:
        try:
            time.sleep(1)
            return watch(sleeper.pid, SETTLE_S).cores * 0.05
        finally:
            sleeper.kill()


def pid_of(node: Node) -> int:
    assert node.daemon is not None
    return node.daemon.pid


def _ingested(node: Node) -> float:
    return node.metric("torchperfd_ingest_events_total") or 0.0


def _listens(port: int) -> bool:
    try:
        return bool(fetch(port, {}))
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long CPU and memory are watched")
    parser.add_argument(
        "--reports", type=float, default=REPORTS_PER_SECOND, help="how often a second each rank reports"
    )
    options = parser.parse_args()
    seconds: float = options.seconds
    pace = (str(STEPS_PER_SECOND), str(options.reports))
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{os.cpu_count()} CPUs, load {load} before the start")
    print(f"a bare Python process that wakes up costs {wake_up_seconds() * 1e3:.3f} ms of CPU here")
    with daemon() as node, ranks(node, WORLD, *pace):
        wrong = at_rest(node, seconds)
        wrong += beside_the_exporter(node)
    wrong += flooded()
    wrong += on_the_grid(min(60.0, seconds), *pace)
    print(f"load {Path('/proc/loadavg').read_text().split()[0]} at the end")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
