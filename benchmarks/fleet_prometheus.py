"""Questions about 10,000 ranks, answered from series: ``python -m benchmarks.fleet_prometheus``.

Five runs, one healthy and four with a cause each, have the metrics pages of 1,250 nodes. The daemon's own
code makes the pages for simulated ranks: a few nodes of each run are simulated, the others are copies with
ranks and names of their own. A real Prometheus and a real VictoriaMetrics scrape them. Measured is the
wall-clock time of whole commands, in processes of their own, with the CPU time of the command and of the
store; ``top`` is opened on a terminal, until its first frame. Modules are compiled by the first of them, as
those of an installed package are. The verdicts are compared with those of
daemons that ask each other, on the same ranks. Exits 1 if a command takes more than 2 s in the median, or if
a verdict differs.
"""

import argparse
import contextlib
import json
import logging
import os
import pty
import resource
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any, Final

import psutil
from benchmarks.judge import exit_code
from tests.support.fleet_series import (
    CASES,
    PER_NODE,
    PageServer,
    SimulatedRun,
    copied,
    origin,
    scrape_config,
    serving,
)
from tests.support.node import free_port
from tests.support.prometheus import Queried, start_configured

from torchperfd_daemon.diagnosis.verdict import Verdict

BOUND_S: Final = 2.0
SIMULATED: Final = 4 * PER_NODE
SCRAPE_S: Final = 15.0
SCRAPES: Final = 3
GIVE_UP_S: Final = 300.0
COMMANDS: Final = ("diagnose", "ranks", "top", "goodput")
SCREEN: Final = (50, 200)
_FRAME: Final = b" ranks on "
COSTS_ALIKE: Final = 0.1


def victoria_metrics(directory: Path, config: Path, port: int) -> Queried:
    """Start a VictoriaMetrics."""
    return Queried(
        directory / "victoria.log",
        port,
        "victoria-metrics",
        f"-promscrape.config={config}",
        f"-storageDataPath={directory / 'victoria'}",
        f"-httpListenAddr=127.0.0.1:{port}",
    )


STORES: Final[Mapping[str, Callable[[Path, Path, int], Queried]]] = {
    "prometheus": start_configured,
    "victoria-metrics": victoria_metrics,
}


def pages(runs: Sequence[SimulatedRun], nodes: int) -> dict[str, bytes]:
    """Return the pages of so many nodes of each run."""
    found = {}
    for run in runs:
        made = run.pages()
        for node in range(nodes):
            found[f"/{run.run}-{node}"] = copied(made[origin(node, len(made))], run.run, node)
    return found


def load(server: PageServer, runs: Sequence[SimulatedRun], nodes: int, store: Queried) -> None:
    """Let a store scrape all pages some times, with new steps on each."""
    wanted, deadline = len(runs) * nodes * PER_NODE, time.monotonic() + GIVE_UP_S
    while store.value("count(torchperfd_train_own_work_seconds)") != wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all {wanted} ranks are scraped within {GIVE_UP_S:.0f} s")
        time.sleep(1)
    for _ in range(SCRAPES):
        for run in runs:
            run.train(int(SCRAPE_S))
        server.pages = pages(runs, nodes)
        time.sleep(SCRAPE_S)


def ask(command: Sequence[str], url: str) -> tuple[float, float, dict[str, Any]]:
    """Run a command; return its wall-clock time, its CPU time and its document."""
    arguments = [sys.executable, "-P", "-m", "torchperfd", *command, "--prometheus", url]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(arguments, stdout=out, stderr=subprocess.PIPE, env=os.environ, check=False)
        took = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} exits with {done.returncode}: {done.stderr.decode()}")
        out.seek(0)
        document = json.load(out) if "--json" in command else {}
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, document


def open_top(url: str) -> tuple[float, float]:
    """Open ``top`` on a terminal; return the time until its first frame, and its CPU time until then."""
    began = time.perf_counter()
    pid, terminal = pty.fork()
    if not pid:
        try:
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *SCREEN, 0, 0))
            arguments = [sys.executable, "-P", "-m", "torchperfd", "top", "--prometheus", url]
            os.execve(sys.executable, arguments, {**os.environ, "TERM": "xterm-256color"})
        finally:
            os._exit(127)
    drawn = b""
    try:
        while _FRAME not in drawn and select.select([terminal], [], [], GIVE_UP_S)[0]:
            drawn += os.read(terminal, 65536)
        took, cpu = time.perf_counter() - began, cpu_seconds(psutil.Process(pid))
        os.write(terminal, b"q")
        with contextlib.suppress(OSError):
            while os.read(terminal, 65536):
                pass
    finally:
        os.waitpid(pid, 0)
        os.close(terminal)
    return took, cpu


def differs(found: Mapping[str, Any], verdict: Verdict) -> str:
    """Return how a verdict from series differs from that of the daemons; empty if it does not."""
    named = (found["cause"], found["rank"], (found["node"] or "") if found["rank"] is not None else "")
    node = verdict.node if verdict.rank is not None else ""
    if named != (verdict.cause.value, verdict.rank, node):
        return f"{verdict.run}: {named} in place of {verdict.summary}"
    cost, own = found["cost_seconds_per_step"], verdict.cost_seconds_per_step
    if abs(cost - own) > COSTS_ALIKE * own:
        return f"{verdict.run}: {cost:.4f} s in place of {own:.4f} s per step"
    return ""


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(name: str, store: Queried, rounds: int, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Print what each command takes; return what is wrong."""
    wrong, url, process = [], f"http://127.0.0.1:{store.port}", psutil.Process(store.process.pid)
    _, _, document = ask(("diagnose", "--json"), url)
    found = {each["run"]: each for each in document["verdicts"]}
    wrong += [text for run, verdict in verdicts.items() if (text := differs(found[run], verdict))]
    for command in COMMANDS:
        before = cpu_seconds(process)
        asked = [open_top(url) if command == "top" else ask([command], url)[:2] for _ in range(rounds)]
        took, cpu = zip(*asked, strict=True)
        middle = statistics.median(took)
        print(
            f"{name:<17}{command:<10}{middle:>8.2f}{min(took):>8.2f}{max(took):>8.2f}"
            f"{statistics.median(cpu):>8.2f}{(cpu_seconds(process) - before) / rounds:>11.2f}",
            flush=True,
        )
        if middle > BOUND_S:
            wrong.append(f"{name}: {command} takes {middle:.2f} s, limit {BOUND_S:g} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", action="append", choices=[*STORES], help="only this one")
    options = parser.parse_args()
    logging.getLogger("torchperfd").setLevel(logging.ERROR)
    nodes = options.ranks // PER_NODE // len(CASES)
    began = time.monotonic()
    runs = [SimulatedRun(name, SIMULATED, change, world=nodes * PER_NODE) for name, change in CASES.items()]
    wrong = []
    with tempfile.TemporaryDirectory(prefix="tpd-") as name, serving() as server:
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{name}/compiled"}
        for store in options.store or STORES:
            server.pages = pages(runs, nodes)
            directory, port = Path(name), free_port()
            config = directory / "scrape.yml"
            scrape_config(config, server, SCRAPE_S)
            queried = STORES[store](directory, config, port)
            try:
                load(server, runs, nodes, queried)
                verdicts = {run.run: run.verdict(nodes) for run in runs}
                if store == (options.store or [*STORES])[0]:
                    ranks = f"{len(runs) * nodes * PER_NODE} ranks of {len(runs)} runs"
                    print(f"{ranks}, loaded in {time.monotonic() - began:.0f} s")
                    print(f"{'':<27}{'seconds':>8}{'from':>8}{'to':>8}{'CPU':>8}{'store CPU':>11}")
                wrong += measure(store, queried, options.rounds, verdicts)
            finally:
                queried.stop()
    print(f"verdicts of {len(runs)} runs compared with those of the daemons")
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
