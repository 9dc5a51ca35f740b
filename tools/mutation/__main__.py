"""Print the mutation score of the pure rooms: the share of small wrong changes that the unit tests notice.

    python -m tools.mutation [--room NAME] [--sample N] [--seed N] [--jobs N]

Records once which tests run which line. Then changes one place at a time, in a copy of the tree, and runs
the tests of that line until one fails. The same seed draws the same changes of the same source.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import coverage
from tools.mutation.mutants import Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = {
    "diagnosis": ("daemon/torchperfd_daemon/diagnosis",),
    "analysis": ("daemon/torchperfd_daemon/analysis",),
    "steps": ("client/torchperfd/steps",),
    "captures": ("client/torchperfd/captures", "daemon/torchperfd_daemon/captures"),
}
_OUTCOMES: Final = ("killed", "timed out", "survived", "no test")
_MAX_TESTS: Final = 100
_MAX_SECONDS: Final = 90.0


class Recorded:
    """The modules of the rooms, and which passing tests run each line."""

    def __init__(self, tree: Path) -> None:
        parts = [tree / part for room in ROOMS.values() for part in room]
        files = [path for part in parts for path in sorted(part.rglob("*.py"))]
        self.sources = {str(path.relative_to(tree)): path.read_text(encoding="utf-8") for path in files}
        self._tests: dict[tuple[str, int], set[str]] = {}
        self._lines: Counter[str] = Counter()
        data = coverage.CoverageData(str(tree / ".coverage"))
        data.read()
        failed = tree / ".pytest_cache" / "v" / "cache" / "lastfailed"
        unfit = {"", *(json.loads(failed.read_text()) if failed.exists() else ())}
        for path in self.sources:
            for line, contexts in data.contexts_by_lineno(str(tree / path)).items():
                self._tests[path, line] = {context.rpartition("|")[0] for context in contexts} - unfit
                self._lines.update(self._tests[path, line])
        if not self._lines:
            raise SystemExit("no test was recorded: run `pytest tests/unit` to see why")

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that can notice a mutant, those that run the fewest lines first."""
        found = self._tests.get((mutant.path, mutant.line)) or self._tests_of_name(mutant.owner)
        return sorted(found, key=lambda test: (self._lines[test], test))[:_MAX_TESTS]

    def _tests_of_name(self, name: str) -> set[str]:
        """Return the tests of lines with a name: what is executed at import belongs to no test."""
        found: set[str] = set()
        for path, source in self.sources.items() if name else ():
            for number, line in enumerate(source.splitlines(), 1):
                if re.search(rf"\b{name}\b", line):
                    found |= self._tests.get((path, number), set())
        return found


def run_pytest(tree: Path, *arguments: str, limit_seconds: float | None = None) -> int | None:
    """Run pytest in a copy of the tree, and return its exit status; None if it did not end in time."""
    # CI has the same random examples in each run; a compiled mutant could be taken for the next one.
    environment = {**os.environ, "CI": "1", "PYTHONPATH": f"{tree}/client:{tree}/daemon:{tree}/cli"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1" if limit_seconds else ""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        env=environment,
        cwd=tree,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def recorded_trees(jobs: int, folder: Path) -> list[Path]:
    """Return a copy of the tree for each process; the first has a record of all unit tests."""
    unneeded = shutil.ignore_patterns(".venv*", ".git", ".*_cache", ".hypothesis", "site", "dist", "build")
    first = shutil.copytree(ROOT, folder / "0", symlinks=True, ignore=unneeded)
    measured = [f"--cov={part}" for room in ROOMS.values() for part in room]
    run_pytest(first, "tests/unit", "-n", str(jobs), *measured, "--cov-context=test", "--cov-report=")
    return [first, *(shutil.copytree(first, folder / str(number)) for number in range(1, jobs))]


def outcome_of(mutant: Mutant, tests: Sequence[str], tree: Path) -> str:
    """Return which of the outcomes a mutant has with these tests."""
    if not tests:
        return "no test"
    path = tree / mutant.path
    original = path.read_bytes()
    path.write_text(mutant.source, encoding="utf-8")
    status = run_pytest(tree, "-x", "-p", "no:cacheprovider", *tests, limit_seconds=_MAX_SECONDS)
    path.write_bytes(original)
    return "timed out" if status is None else "killed" if status else "survived"


def outcomes(drawn: Sequence[Mutant], record: Recorded, trees: Sequence[Path]) -> list[tuple[Mutant, str]]:
    """Try mutants in all copies of the tree at the same time; return them in the order of the source."""

    def attempt(number: int) -> list[tuple[Mutant, str]]:
        part = drawn[number :: len(trees)]
        return [(mutant, outcome_of(mutant, record.tests(mutant), trees[number])) for mutant in part]

    with ThreadPoolExecutor(len(trees)) as pool:
        return sorted(result for part in pool.map(attempt, range(len(trees))) for result in part)


def main() -> None:
    """Print the score of each room, and the mutants that no test noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--room", action="append", choices=ROOMS, help="all by default; can be repeated")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each room (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (default: 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchperfd-mutation-") as folder:
        trees = recorded_trees(options.jobs, Path(folder))
        record = Recorded(trees[0])
        print("room".ljust(10), "mutants", *(f"{name:>9}" for name in _OUTCOMES), "score", flush=True)
        for room in options.room or ROOMS:
            sources = {path: text for path, text in record.sources.items() if path.startswith(ROOMS[room])}
            every = [mutant for path, text in sources.items() for mutant in mutants(path, text)]
            drawn = random.Random(f"{room} {options.seed}").sample(every, min(options.sample, len(every)))
            results = outcomes(drawn, record, trees)
            counts = Counter(outcome for _, outcome in results)
            score = (counts["killed"] + counts["timed out"]) / len(results)
            columns = (f"{counts[name]:>9}" for name in _OUTCOMES)
            print(room.ljust(10), f"{len(results):>7}", *columns, f"{score:>5.0%}", flush=True)
            for mutant, outcome in results:
                if outcome in _OUTCOMES[2:]:
                    print(f"  {outcome}: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)


if __name__ == "__main__":
    main()
