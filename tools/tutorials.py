"""Write the tutorials in docs/tutorials from runs of their scripts.

    python -m tools.tutorials [--keep-measured] [NAME...]

A tutorial is a folder below client/examples/tutorials: scripts, and a template ``text.txt``. Its page is the
template with these parts filled in:

- a fenced block ``run``: its command and what that printed. ``run drop=REGEX`` leaves lines out;
- a fenced block ``start``: a command that goes on in the background until the end of the page;
- ``CAPTURE_ID`` in a command: the newest capture;
- ``<!-- code FILE NAME -->``: a function or class of a script;
- ``<!-- diff FILE FILE -->``: the difference of two scripts;
- ``<!-- measured -->``: what the change was measured to gain.

All commands run with one thread for operators, in a folder and with a home of their own.
"""

import argparse
import ast
import contextlib
import difflib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPTS: Final = ROOT / "client" / "examples" / "tutorials"
PAGES: Final = ROOT / "docs" / "tutorials"

MIN_SHOWN_RATIO: Final = 1.8
"""A page is written only if its change gains this much, so that a test can ask for much less."""

_PART: Final = re.compile(
    r"^```(run|start)([^\n]*)\n(.*?)\n```$|^<!-- (code|diff|measured) ?(.*?)-->$", re.M | re.S
)
_STEPS_BEFORE_CAPTURES: Final = 20
_TIMEOUT_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Tutorial:
    """One tutorial.

    Attributes:
        name: Its folder.
        before: The script and its arguments before the change.
        after: The same after the change.
        quantity: What the change makes smaller, in words.
        read: Returns that quantity, in milliseconds, from the training part of a run's report.
    """

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    quantity: str
    read: Callable[[Mapping[str, Any]], float]

    @property
    def folder(self) -> Path:
        """The folder of the scripts and the template."""
        return SCRIPTS / self.name

    @property
    def page(self) -> Path:
        """The page that is written."""
        return PAGES / self.name / "index.md"

    @property
    def template(self) -> str:
        """The template of the page."""
        return (self.folder / "text.txt").read_text()


def _step(train: Mapping[str, Any]) -> float:
    return 1e3 * float(train["step_seconds_total"]) / int(train["steps"])


def _phase(name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda train: 1e3 * float(train["phases"][name]["seconds_total"]) / int(train["steps"])


TUTORIALS: Final = (
    Tutorial(
        "dataloader",
        ("train.py",),
        ("train.py", "--workers", "4"),
        "a step of 32 images",
        _step,
    ),
    Tutorial(
        "datasets",
        ("train.py",),
        ("train.py", "--dataset", "in_torch"),
        "`data` in a step of 32 images",
        _phase("data"),
    ),
    Tutorial(
        "operators", ("before.py",), ("after.py",), "`augment` in a step of 128 images", _phase("augment")
    ),
    Tutorial("module", ("before.py",), ("after.py",), "`mask_indices` in a step", _phase("mask_indices")),
    Tutorial("phases", ("train.py",), ("train.py", "--fused"), "`optimizer` in a step", _phase("optimizer")),
)


class Workplace:
    """A copy of the scripts with a home of its own, in which a tutorial's commands run."""

    def __init__(self, tutorial: Tutorial, directory: Path) -> None:
        shutil.copytree(
            SCRIPTS, directory / "tutorials", ignore=shutil.ignore_patterns("__pycache__", "*.txt")
        )
        self._folder = directory / "tutorials" / tutorial.name
        self._home = directory / "home"
        self._directory = directory
        (directory / "run").mkdir(mode=0o700)
        self._home.mkdir()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TORCHPERFD_", "XDG_"))
        }
        self._env = {
            **kept,
            "HOME": str(self._home),
            "XDG_RUNTIME_DIR": str(directory / "run"),
            "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("client", "daemon", "cli")),
            # torch warns of more workers than CPUs.
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "110",
        }
        self._capture = "CAPTURE_ID"

    def run(self, command: str) -> str:
        """Run a command line to its end; return what it printed, with this folder's paths shortened.

        Raises:
            SystemExit: The command failed.
        """
        done = self._execute(command)
        if done.returncode:
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}")
        for match in re.finditer(r"captures/([0-9]{8}-[0-9]{6}-[0-9a-f]+)/", done.stdout):
            self._capture = match[1]
        return done.stdout.replace(str(self._home), "~").replace(str(self._directory), "…").strip("\n")

    def filled_in(self, command: str) -> str:
        """Return a command with the id of the newest capture in it."""
        return command.replace("CAPTURE_ID", self._capture)

    @contextlib.contextmanager
    def background(self, command: str) -> Iterator[None]:
        """Keep a training run in the background; enters once it has made some steps.

        Raises:
            SystemExit: It made no steps.
        """
        process = subprocess.Popen(
            self._arguments(command),
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            while self._steps() < _STEPS_BEFORE_CAPTURES:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{command} made no steps")
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_TIMEOUT_SECONDS)

    def report(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        """Run a script; return the training part of its report."""
        self.run(
            shlex.join(
                [
                    "torchperfd",
                    "run",
                    "--quiet",
                    "--no-daemon",
                    "--no-keep",
                    "--report",
                    "report.json",
                    *arguments,
                ]
            )
        )
        document = json.loads((self._folder / "report.json").read_text())
        train: Mapping[str, Any] = document["ranks"][0]["train"]
        return train

    def _steps(self) -> int:
        done = self._execute("torchperfd ps --json")
        if done.returncode:
            return 0
        runs = json.loads(done.stdout)["runs"]
        return max((rank["steps"] for run in runs for rank in run["ranks"]), default=0)

    def _execute(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._arguments(command),
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )

    def _arguments(self, command: str) -> list[str]:
        program, *arguments = shlex.split(command)
        if program == "torchperfd":
            return [sys.executable, "-m", "torchperfd", *arguments]
        return [sys.executable if program == "python" else program, *arguments]


@dataclass(frozen=True, slots=True)
class Gain:
    """A quantity before and after a change, in milliseconds: the least of several runs of each."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How many times as fast it has become."""
        return self.before / self.after


def measure(tutorial: Tutorial, place: Workplace, rounds: int, enough_ratio: float = math.inf) -> Gain:
    """Run a tutorial's scripts before and after the change, alternately.

    Args:
        rounds: The most rounds.
        enough_ratio: No more rounds once the gain is this large.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for arguments, values in zip((tutorial.before, tutorial.after), found, strict=True):
            values.append(tutorial.read(place.report(arguments)))
        gain = Gain(min(found[0]), min(found[1]))
        if gain.ratio >= enough_ratio:
            break
    return gain


def parts(template: str) -> Iterator[tuple[str, str, str]]:
    """Yield the parts of a template: the kind, its options and its text; ``prose`` between other parts."""
    end = 0
    for match in _PART.finditer(template):
        yield "prose", "", template[end : match.start()]
        if match[1]:
            yield match[1], match[2].strip(), match[3]
        else:
            yield match[4], match[5].strip(), ""
        end = match.end()
    yield "prose", "", template[end:]


def excerpt(tutorial: Tutorial, kind: str, options: str) -> str:
    """Return the fenced block of a part that only shows code."""
    names = options.split()
    if kind == "diff":
        before, after = ((tutorial.folder / name).read_text().splitlines() for name in names)
        lines = list(difflib.unified_diff(before, after, names[0], names[1], n=1, lineterm=""))
        return "\n".join(["```diff", *lines, "```"])
    source = (tutorial.folder / names[0]).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == names[1]:
            return f"```python\n{ast.get_source_segment(source, node)}\n```"
    raise ValueError(f"{names[0]} has no {names[1]}")


def write(tutorial: Tutorial, *, keep_measured: bool = False) -> None:
    """Run a tutorial's commands and write its page.

    Args:
        keep_measured: Keep the table of gains that the page has.

    Raises:
        SystemExit: A command failed, or the change gained less than :data:`MIN_SHOWN_RATIO`.
    """
    written: list[str] = []
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tpd-"))
        place = Workplace(tutorial, Path(directory))
        running = stack.enter_context(contextlib.ExitStack())
        for kind, options, text in parts(tutorial.template):
            if kind == "prose":
                written.append(text)
            elif kind == "start":
                running.enter_context(place.background(text))
                written.append(f"```console\n$ {text} &\n```")
            elif kind == "run":
                command = place.filled_in(text)
                drop = options.removeprefix("drop=")
                lines = [each.rstrip() for each in place.run(command).splitlines()]
                lines = [each for each in lines if not drop or not re.search(drop, each)]
                text = "\n".join(lines).strip("\n")
                written.append(f"```console\n$ {command}\n{text}\n```")
            elif kind == "measured":
                running.close()
                table = _kept_table(tutorial) if keep_measured else ""
                written.append(table or _table(tutorial, measure(tutorial, place, rounds=3)))
            else:
                written.append(excerpt(tutorial, kind, options))
    tutorial.page.parent.mkdir(parents=True, exist_ok=True)
    tutorial.page.write_text("".join(written))


def _kept_table(tutorial: Tutorial) -> str:
    """Return the table of gains of the page; empty if it has none."""
    page = tutorial.page.read_text() if tutorial.page.exists() else ""
    found = re.search(r"^\| \| .*\|\n\|---\|---\|\n(?:\|.*\|\n){2}\| times as fast .*\|$", page, re.MULTILINE)
    return found[0] if found else ""


def _table(tutorial: Tutorial, gain: Gain) -> str:
    if gain.ratio < MIN_SHOWN_RATIO:
        sys.exit(f"{tutorial.name}: only {gain.ratio:.2f} times as fast; is the machine busy?")
    before, after = shlex.join(tutorial.before), shlex.join(tutorial.after)
    return "\n".join(
        (
            f"| | {tutorial.quantity} |",
            "|---|---|",
            f"| `{before}` | {gain.before:.3g} ms |",
            f"| `{after}` | {gain.after:.3g} ms |",
            f"| times as fast | {gain.ratio:.2g} |",
        )
    )


def main() -> None:
    """Write the pages that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep-measured", action="store_true", help="Keep the tables of gains.")
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in TUTORIALS)])
    options = parser.parse_args()
    for tutorial in TUTORIALS:
        if not options.names or tutorial.name in options.names:
            began = time.monotonic()
            write(tutorial, keep_measured=options.keep_measured)
            print(f"{tutorial.page.relative_to(ROOT)}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
