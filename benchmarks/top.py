"""What `torchperfd top` costs: ``python -m benchmarks.top [--seconds 30] [--rounds 7] [--python PATH ...]``.

A daemon with eight ranks of ten steps a second and eight GPUs is watched on a terminal of 200 x 50 cells.
Measured are the time from the start of the command to the first row of a rank, in the median and at best,
the CPU time until then, and that of the command while it is open. Several interpreters, each with another
version installed, are measured in turn. Exits 1 when the first one's `top` takes more than 3 % of a core,
or more than half a second to open at best.
"""

import argparse
import contextlib
import os
import pty
import select
import statistics
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from typing import Final

from benchmarks.daemon.__main__ import REPORTS_PER_SECOND, STEPS_PER_SECOND, daemon, ranks
from benchmarks.daemon.rank import WORLD
from benchmarks.daemon.watch import Cost, cpu_seconds, watch
from benchmarks.judge import exit_code
from tests.support.node import Node

COLUMNS: Final = 200
ROWS: Final = 50
MAX_CORES: Final = 0.03
MAX_OPENING_S: Final = 0.5
SETTLE_S: Final = 5.0
GIVE_UP_S: Final = 30.0
_RANK: Final = b"training"


@contextlib.contextmanager
def top(python: str, node: Node) -> Iterator[tuple[int, int]]:
    """Run `top` on a terminal of its own; yield its process and our end of the terminal."""
    pid, terminal = pty.fork()
    if not pid:
        try:
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            environment = {**node.env, "TERM": "xterm-256color"}
            os.execvpe(python, [python, "-m", "torchperfd", "top"], environment)
        finally:
            os._exit(127)
    try:
        yield pid, terminal
    finally:
        with contextlib.suppress(OSError):
            os.write(terminal, b"q")
        _drain(terminal, GIVE_UP_S)
        os.waitpid(pid, 0)
        os.close(terminal)


def _drain(terminal: int, seconds: float, until: bytes = b"") -> bytes:
    """Read what is drawn until something is, until the other end is closed, or for so long."""
    drawn = b""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([terminal], [], [], min(left, 0.1))[0]:
            continue
        try:
            drawn += os.read(terminal, 65536)
        except OSError:
            break
        if until and until in drawn:
            break
    return drawn


def opening_seconds(python: str, node: Node) -> tuple[float, float]:
    """Return the time to the first row of a rank, and the CPU time until then."""
    began = time.monotonic()
    with top(python, node) as (pid, terminal):
        drawn = _drain(terminal, GIVE_UP_S, _RANK)
        took, cpu = time.monotonic() - began, cpu_seconds(pid)
    assert _RANK in drawn, drawn
    return took, cpu


def cost(python: str, node: Node, seconds: float) -> Cost:
    """Return what `top` costs while it is open, its start left out."""
    with top(python, node) as (pid, terminal):
        _drain(terminal, SETTLE_S)
        reader = threading.Thread(target=_drain, args=(terminal, seconds))
        reader.start()
        found = watch(pid, seconds)
        reader.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long CPU and memory are watched")
    parser.add_argument("--rounds", type=int, default=7, help="how often it is opened")
    parser.add_argument("--python", action="append", help="an interpreter with torchperfd installed")
    options = parser.parse_args()
    pythons: list[str] = options.python or [sys.executable]
    openings: dict[str, list[tuple[float, float]]] = {python: [] for python in pythons}
    with daemon() as node, ranks(node, WORLD, str(STEPS_PER_SECOND), str(REPORTS_PER_SECOND)):
        time.sleep(SETTLE_S)
        for _ in range(options.rounds):
            for python, found in openings.items():
                found.append(opening_seconds(python, node))
        costs = {python: cost(python, node, options.seconds) for python in pythons}
    for python, found in openings.items():
        walls, cpus = zip(*found, strict=True)
        print(
            f"{python}: opens in {statistics.median(walls):.2f} s, at best {min(walls):.2f} s,"
            f" with {statistics.median(cpus):.2f} s of CPU time;"
            f" {costs[python].cores:.1%} of a core, {costs[python].peak_bytes / 2**20:.0f} MiB"
        )
    wrong = []
    if costs[pythons[0]].cores > MAX_CORES:
        wrong.append(f"{costs[pythons[0]].cores:.1%} of a core, limit {MAX_CORES:.0%}")
    best = min(wall for wall, _ in openings[pythons[0]])
    if best > MAX_OPENING_S:
        wrong.append(f"opens in {best:.2f} s, limit {MAX_OPENING_S:g} s")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
