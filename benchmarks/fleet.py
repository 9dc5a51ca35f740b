"""How long one question to a thousand daemons takes, with some of them dead.

``python -m benchmarks.fleet`` starts the daemons' fleet services in a process of their own, on loopback.
Half of the dead refuse to be connected to, the other half accept and send nothing, like a machine that
hangs. Each question is put twice, first without any connection, and all of that several times, each time by
another daemon. Bound: 2 s and all dead named, every time.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.unit.daemon.fleet_nodes import RUN, asking, may_all, none_here, start_node

from torchperfd_daemon.captures.manifest import CaptureOptions, CaptureState
from torchperfd_daemon.fleet.addresses import Address

BOUND_S = 2.0
ROUNDS = 5


async def serve(count: int, world: int, directory: Path) -> None:
    """Serve that many daemons with one rank each until standard input closes."""
    nodes = [await start_node(directory, [rank], world) for rank in range(count)]
    print(json.dumps([node.address.port for node in nodes]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


@dataclass(frozen=True, slots=True)
class Answered:
    """One question, answered.

    Attributes:
        seconds: How long that took.
        own_cpu: Processor seconds of the asking daemon.
        their_cpu: The same of all daemons that were asked.
        ranks: How many ranks answered.
        named: Addresses of those reported as unreachable.
    """

    seconds: float
    own_cpu: float
    their_cpu: float
    ranks: int
    named: frozenset[str]


async def ask(fleet: psutil.Process, peers: list[Address], directory: Path) -> dict[str, Answered]:
    """Put the questions as a daemon that has no connection yet."""
    async with asking(directory, peers) as (view, coordinator):

        async def list_runs() -> tuple[float, frozenset[str], int]:
            listed = await view.runs([], lambda _: True)
            ranks = sum(len(run.ranks) for run in listed.runs)
            return time.perf_counter(), frozenset(peer.address for peer in listed.unreachable), ranks

        async def prepare() -> tuple[float, frozenset[str], int]:
            prepared = 0.0
            async with view.gather(RUN, (), none_here, may_all) as gathered:
                named = frozenset(peer.address for peer in gathered.unreachable)
                options = CaptureOptions(steps=3)
                async for progress in coordinator.capture(RUN, gathered.participants, options, 60.0):
                    if progress.record.state is CaptureState.ARMED and not prepared:
                        prepared = time.perf_counter()
                ranks = sum(rank.state is CaptureState.COMPLETE for rank in progress.record.ranks)
            return prepared, named, ranks

        questions: dict[str, Callable[[], Awaitable[tuple[float, frozenset[str], int]]]] = {
            "ps, no connections yet": list_runs,
            "ps again": list_runs,
            "capture until all are prepared": prepare,
            "the same again": prepare,
        }
        answered = {}
        for name, question in questions.items():
            began, own, theirs = time.perf_counter(), time.process_time(), _cpu_seconds(fleet)
            ended, named, ranks = await question()
            own, theirs = time.process_time() - own, _cpu_seconds(fleet) - theirs
            answered[name] = Answered(ended - began, own, theirs, ranks, named)
    return answered


def judge(rounds: Sequence[Mapping[str, Answered]], living: int, dead: frozenset[str]) -> bool:
    """Print what each question took; return whether it was answered in time and all dead named."""
    good = True
    print(
        f"{'':<32}{'seconds':>8} {'from':>5} {'to':>5}{'own CPU':>9}{'their CPU':>11}{'ranks':>7}  dead named"
    )
    for name in rounds[0]:
        answers = [answered[name] for answered in rounds]
        seconds = [answer.seconds for answer in answers]
        own = statistics.median(answer.own_cpu for answer in answers)
        theirs = statistics.median(answer.their_cpu for answer in answers)
        ranks = min(answer.ranks for answer in answers)
        reported = min(len(answer.named & dead) for answer in answers)
        taken = f"{statistics.median(seconds):>8.2f} {min(seconds):>5.2f} {max(seconds):>5.2f}"
        print(f"{name:<32}{taken}{own:>9.2f}{theirs:>11.2f}{ranks:>7}  {reported} of {len(dead)}")
        good = good and max(seconds) <= BOUND_S
        good = good and all(answer.named == dead and answer.ranks == living for answer in answers)
    return good


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
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
            dead_peers = [Address("127.0.0.1", each.getsockname()[1]) for each in (*closed, *held)]
            peers = [*(Address("127.0.0.1", port) for port in ports), *dead_peers]
            process = psutil.Process(fleet.pid)
            rounds = [
                asyncio.run(ask(process, peers, directory / f"asking-{number}")) for number in range(ROUNDS)
            ]
            good = judge(rounds, living, frozenset(map(str, dead_peers)))
            for each in (*held, *closed):
                each.close()
            fleet.stdin.close()
    print(f"{ROUNDS} rounds; within {BOUND_S} s, and all dead named: {'yes' if good else 'NO'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
