"""How long one question to a thousand daemons takes, with some of them dead.

``python -m benchmarks.fleet`` starts the daemons' fleet services in a process of their own, on loopback.
Half of the dead refuse to be connected to, the other half accept and say nothing, like a machine that
hangs. Each question is put twice, first without any connection. Bound: 2 s, and all dead are named.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
from tests.unit.daemon.fleet_nodes import RUN, asking, none_here, start_node

from torchperfd_daemon.captures import CaptureState
from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.fleet import Address

BOUND_S = 2.0


async def serve(count: int, world: int, directory: Path) -> None:
    """Serve that many daemons with one rank each until standard input closes."""
    nodes = [await start_node(directory, [rank], world) for rank in range(count)]
    print(json.dumps([node.address.port for node in nodes]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def ask(
    fleet: psutil.Process,
    living: list[Address],
    refusing: list[Address],
    silent: list[Address],
    directory: Path,
) -> bool:
    """Put the questions; return whether all were answered in time and all dead named."""
    peers, dead = [*living, *refusing, *silent], {str(each) for each in (*refusing, *silent)}
    good = True
    async with asking(directory, peers) as (view, coordinator):

        async def list_runs() -> tuple[float, set[str], int]:
            listed = await view.runs([])
            ranks = sum(len(run.ranks) for run in listed.runs)
            return time.perf_counter(), {peer.address for peer in listed.unreachable}, ranks

        async def prepare() -> tuple[float, set[str], int]:
            prepared = 0.0
            async with view.gather(RUN, (), none_here) as gathered:
                named = {peer.address for peer in gathered.unreachable}
                options = CaptureOptions(steps=3)
                async for progress in coordinator.capture(RUN, gathered.participants, options, 60.0):
                    if progress.record.state is CaptureState.ARMED and not prepared:
                        prepared = time.perf_counter()
                ranks = sum(rank.state is CaptureState.COMPLETE for rank in progress.record.ranks)
            return prepared, named, ranks

        print(f"{'':<34} {'seconds':>8} {'own CPU':>8} {'their CPU':>9} {'ranks':>6} {'dead named':>11}")
        questions: list[tuple[str, Callable[[], Awaitable[tuple[float, set[str], int]]]]] = [
            ("ps, no connections yet", list_runs),
            ("ps again", list_runs),
            ("capture until all are prepared", prepare),
            ("the same again", prepare),
        ]
        for name, question in questions:
            began, busy, theirs = time.perf_counter(), time.process_time(), _cpu_seconds(fleet)
            ended, named, ranks = await question()
            seconds = ended - began
            busy, theirs = time.process_time() - busy, _cpu_seconds(fleet) - theirs
            row = f"{name:<34} {seconds:>8.2f} {busy:>8.2f} {theirs:>9.2f} {ranks:>6}"
            print(f"{row} {len(named):>5} of {len(dead)}")
            good = good and seconds <= BOUND_S and named == dead and ranks == len(living)
    return good


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Run it; exit code 1 when the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemons", type=int, default=1000)
    parser.add_argument("--dead", type=float, default=0.01, help="part of them")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    dead = round(arguments.daemons * arguments.dead)
    living = arguments.daemons - dead
    with tempfile.TemporaryDirectory(prefix="tpd-") as name:
        directory = Path(name)
        if arguments.serve is not None:
            asyncio.run(serve(arguments.serve, arguments.daemons, directory))
            return
        command = [sys.executable, "-m", "benchmarks.fleet", "--serve", str(living)]
        command += ["--daemons", str(arguments.daemons)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
        ) as fleet:
            assert fleet.stdout is not None
            assert fleet.stdin is not None
            ports = json.loads(fleet.stdout.readline())
            # The one is bound only and refuses, the other listens and never accepts.
            held = [socket.create_server(("127.0.0.1", 0)) for _ in range(dead // 2)]
            closed = [socket.socket() for _ in range(dead - dead // 2)]
            for each in closed:
                each.bind(("127.0.0.1", 0))
            good = asyncio.run(
                ask(
                    psutil.Process(fleet.pid),
                    [Address("127.0.0.1", port) for port in ports],
                    [Address("127.0.0.1", each.getsockname()[1]) for each in closed],
                    [Address("127.0.0.1", each.getsockname()[1]) for each in held],
                    directory,
                )
            )
            for each in (*held, *closed):
                each.close()
            fleet.stdin.close()
    print(f"within {BOUND_S} s, and all dead named: {'yes' if good else 'NO'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
