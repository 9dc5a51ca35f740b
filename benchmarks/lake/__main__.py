"""Measure the lake: exactly once, views, memory of the daemon, and a store that is away for a day.

    python -m benchmarks.lake --nodes 200 --hours 24 --kills 50

- Nodes of eight ranks write a lake on a simulated clock, with the daemon's journal and sender, into a store
  that fails one time in five. Their processes are killed at random moments. Each row must be there once.
- `torchperfd history` loads the lake, then answers each shipped view.
- A node without a store for a day: what waits on its disk, and what arrives afterwards.
- A daemon with eight ranks, with and without ``--lake``: CPU and memory (``--seconds 0`` leaves it out).

Exits 1 when a row is missing or there twice, a view takes more than 3 s, the journal of a day exceeds its
bound, or the daemon takes more than 15 MB more.
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

from benchmarks.judge import exit_code
from benchmarks.lake.player import (
    HOURLY,
    MIDNIGHT,
    NODES_OF_JOB,
    RANKS,
    WINDOWS_OF_RUN,
    UnreliableStore,
    next_window,
    node_name,
    record_window,
    send_all,
)
from tests.support.node import ROOT

from torchperfd_cli.lake.database import LakeDatabase, day, view_names
from torchperfd_cli.lake.objects import LakeObjects
from torchperfd_daemon.lake.journal import FOLDER, MAX_BYTES, Journal, Marked
from torchperfd_daemon.lake.rows import SPAN_S
from torchperfd_daemon.lake.tables import JSON_LINES
from torchperfd_daemon.lake.uploader import WINDOW_S

MAX_VIEW_S: Final = 3.0
MAX_ADDED_MB: Final = 15.0
PLAYERS: Final = 4
_DAY_WINDOWS: Final = int(86_400 / WINDOW_S)


def play_with_kills(folder: Path, nodes: int, windows: int, kills: int, pause: float) -> int:
    """Have processes play nodes, and kill one of them now and then; return how many were killed.

    Args:
        pause: Mean seconds between two kills.
    """
    (folder / "lake").mkdir(parents=True, exist_ok=True)
    shares = [(nodes * each // PLAYERS, nodes * (each + 1) // PLAYERS) for each in range(PLAYERS)]
    running = [_start(folder, share, windows) for share in shares]
    chance, killed = random.Random(5), 0
    try:
        while any(process.poll() is None for process in running):
            time.sleep(chance.uniform(0.5, 1.5) * pause)
            # One that still plays: a kill must not be lost on one that is done.
            victim = chance.choice([n for n, each in enumerate(running) if each.poll() is None] or [0])
            if killed < kills and running[victim].poll() is None:
                running[victim].kill()
                running[victim].wait()
                killed += 1
                running[victim] = _start(folder, shares[victim], windows)
            elif killed >= kills:
                for process in running:
                    process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(process.returncode for process in running):
        raise RuntimeError("a player failed; its error is above")
    return killed


def _start(folder: Path, share: tuple[int, int], windows: int) -> "subprocess.Popen[bytes]":
    arguments = [str(folder), *map(str, share), str(windows)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.lake.player", *arguments], cwd=ROOT)


def expected_rows(nodes: int, windows: int) -> dict[str, int]:
    """Return how many rows of each table the nodes have recorded."""
    return {
        "steps": nodes * RANKS * windows * int(WINDOW_S / SPAN_S),
        "goodput": nodes * RANKS * (windows // HOURLY),
        "verdicts": nodes * (windows // HOURLY),
        "runs": nodes * (windows // WINDOWS_OF_RUN),
    }


_KEYS: Final = {
    "steps": "(node, rank, time_unix_seconds)",
    "goodput": "(node, rank, until_unix_seconds)",
    "verdicts": "(node, until_unix_seconds)",
    "runs": "(node, run)",
}


def open_database(folder: Path) -> LakeDatabase:
    """Open a database of the lake in a folder, over all days that were played."""
    first = day(MIDNIGHT)
    objects = LakeObjects((folder / "lake").as_uri())
    return LakeDatabase(objects, folder / "history.duckdb", first, first + timedelta(days=2))


def check_rows(database: LakeDatabase, expected: dict[str, int]) -> list[str]:
    """Count the rows in the lake; return what is wrong."""
    wrong = []
    for table, rows in expected.items():
        began, before = time.monotonic(), time.process_time()
        [(found,)] = database.answer(f"SELECT count(*) FROM {table}").rows
        seconds, cpu = time.monotonic() - began, time.process_time() - before
        [(distinct,)] = database.answer(f"SELECT count(DISTINCT {_KEYS[table]}) FROM {table}").rows
        print(
            f"{table}: {found:,} rows, {distinct:,} of them distinct, {rows:,} recorded;"
            f" loaded in {seconds:.1f} s, {cpu:.1f} s of CPU",
            flush=True,
        )
        if not found == distinct == rows:
            wrong.append(f"{table} has {found:,} rows, {distinct:,} distinct, of {rows:,}")
    return wrong


def time_views(database: LakeDatabase) -> list[str]:
    """Ask each view, objects listed anew each time; return what is wrong."""
    wrong = []
    for view in view_names():
        began = time.monotonic()
        rows = len(database.answer(f"SELECT * FROM {view}").rows)
        seconds = time.monotonic() - began
        print(f"view {view}: {seconds:.2f} s, {rows} rows")
        if seconds > MAX_VIEW_S:
            wrong.append(f"{view} takes {seconds:.1f} s, limit {MAX_VIEW_S:.0f} s")
        if not rows:
            wrong.append(f"{view} is empty")
    return wrong


def away_for(folder: Path, windows: int) -> list[str]:
    """Play a node whose store is away for so many windows, then comes back; return what is wrong."""
    (folder / "lake").mkdir(parents=True)
    journal = Journal(folder / "journal", node_name(0))
    for _ in range(windows):
        record_window(journal, 0)
    waiting = journal.pending()
    on_disk = sum(path.stat().st_size for path in (folder / "journal").iterdir())
    print(
        f"store away for {windows * WINDOW_S / 3600:.0f} h: {waiting.rows:,} rows wait in"
        f" {waiting.bytes / 1e6:.1f} MB of batches, {on_disk / 1e6:.1f} MB on the disk,"
        f" bound {MAX_BYTES / 1e6:.0f} MB"
    )
    wrong = [] if max(waiting.bytes, on_disk) <= MAX_BYTES else ["the journal exceeds its bound"]
    is_all_sent = asyncio.run(send_all(journal, UnreliableStore(folder / "lake", 0.0, random.Random())))
    if not is_all_sent or journal.pending().rows or next_window(journal) != windows:
        wrong.append("rows still wait after the store has come back")
    journal.close()
    database = open_database(folder)
    wrong += check_rows(database, expected_rows(1, windows))
    database.close()
    return wrong


def daemon_memory(folder: Path, seconds: float) -> list[str]:
    """Compare a daemon with and without a lake; return what is wrong."""
    # They load what the rest does not need: a fake GPU driver, gRPC.
    from benchmarks.daemon.__main__ import REPORTS_PER_SECOND, STEPS_PER_SECOND, daemon, pid_of, ranks
    from benchmarks.daemon.watch import watch

    lake = folder / "lake"
    lake.mkdir(parents=True)
    # Something to send from the first moment on.
    captures = folder / "captures"
    journal = Journal(captures / FOLDER, socket.gethostname())
    journal.append(MIDNIGHT, lambda _: Marked([("runs", {"node": "n"})]))
    journal.close()
    steps = (str(STEPS_PER_SECOND), str(REPORTS_PER_SECOND))
    peaks = {}
    for name, options in (
        ("without", []),
        ("with", ["--lake", lake.as_uri(), "--captures-dir", str(captures)]),
    ):
        with daemon(*options) as node, ranks(node, RANKS, *steps):
            time.sleep(min(35.0, seconds / 2))
            cost = watch(pid_of(node), seconds)
            peaks[name] = cost.peak_bytes / 1e6
            print(f"daemon {name} a lake: {cost.peak_bytes / 1e6:.1f} MB, {cost.cores:.2%} of a core")
    if not any(lake.rglob("*-*.*")):
        return ["the daemon has sent nothing"]
    added = peaks["with"] - peaks["without"]
    print(f"the lake adds {added:+.1f} MB, limit {MAX_ADDED_MB:.0f} MB")
    return [f"{added:.1f} MB, limit {MAX_ADDED_MB:.0f} MB"] if added > MAX_ADDED_MB else []


def sender_cost(folder: Path) -> None:
    """Print what a sender takes for five minutes of one node."""
    from torchperfd_daemon.lake.uploader import preferred_form, sender_command

    (folder / "lake").mkdir(parents=True)
    journal = Journal(folder / "journal", "n")
    journal.append(MIDNIGHT, lambda _: Marked([("runs", {"node": "n"})]))
    journal.seal(MIDNIGHT, preferred_form() or JSON_LINES)
    before = os.times()
    command = sender_command((folder / "lake").as_uri(), "bench", str(folder / "journal"), "n")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"a sender takes {spent:.2f} s of CPU each {WINDOW_S:.0f} s, {spent / WINDOW_S:.2%} of a core")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=4 * NODES_OF_JOB)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pause", type=float, default=2.0, help="Mean seconds between two kills.")
    parser.add_argument("--away-hours", type=float, default=24.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="To measure each daemon.")
    parser.add_argument("--folder", type=Path, help="Keep the lake there, and continue one that was ended.")
    options = parser.parse_args(arguments)
    windows = int(options.hours * 3600 / WINDOW_S)
    # So that a benchmark that is ended ends its players.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="torchperfd-lake-") as directory:
        fleet = options.folder or Path(directory) / "fleet"
        began = time.monotonic()
        killed = play_with_kills(fleet, options.nodes, windows, options.kills, options.pause)
        objects = sum(1 for _ in (fleet / "lake").rglob("*.parquet"))
        print(
            f"{options.nodes} nodes x {RANKS} ranks x {options.hours:g} h: {objects:,} objects in"
            f" {time.monotonic() - began:.0f} s, {killed} kills",
            flush=True,
        )
        wrong = (
            [] if killed == options.kills else [f"only {killed} of {options.kills} kills fell into the run"]
        )
        database = open_database(fleet)
        wrong += check_rows(database, expected_rows(options.nodes, windows))
        wrong += time_views(database)
        database.close()
        wrong += away_for(Path(directory) / "away", int(options.away_hours * 3600 / WINDOW_S))
        if options.seconds:
            sender_cost(Path(directory) / "sender")
            wrong += daemon_memory(Path(directory) / "daemon", options.seconds)
    return exit_code(wrong)


if __name__ == "__main__":
    sys.exit(main())
