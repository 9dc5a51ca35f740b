"""How often the advice on a loader's workers changes while a loop stays the same.

    python -m benchmarks.steady_advice [--minutes 10]

A run waits for a loader that a number of workers would keep up with. ``torchperfd diagnose`` is asked every
five seconds. Afterwards the number is read from the card, the trace line, ``analyze``, its HTML page, the
kept run and ``tune``. Exits 1 if the advice has changed, or if two of these differ.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.judge import Figure, exit_code, missed, rows
from tests.support.node import Node, import_path, new_node

EVERY_S: Final = 5.0
TIMEOUT_S: Final = 240.0
SCRIPT: Final = """
import pathlib, sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Waits(Dataset):
    def __len__(self):
        return 10**7
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(16)

def main():
    stop = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs in DataLoader(Waits(), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        time.sleep(0.006)
        if stop.exists():
            break

if __name__ == "__main__":
    main()
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steady_advice", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    with new_node() as node:
        del node.env["TORCHPERFD_NO_ADVISE"]
        node.env["PYTHONPATH"] = import_path()
        node.env["TORCHPERFD_RUNS_DIR"] = str(node.directory / "runs")
        live, said = measure(node, 60 * minutes)
    changes = sum(earlier != later for earlier, later in itertools.pairwise(live))
    for name, numbers in said.items():
        print(f"{name:<12} {', '.join(sorted(numbers)) or '-'}")
    everywhere = set[str]().union(*said.values())
    figures = [
        Figure(f"changes of the advice, asked {len(live)} times", changes, "{:.0f}", most=0),
        Figure("numbers in all places", len(everywhere), "{:.0f}", least=1, most=1),
        Figure("places without a number", sum(not each for each in said.values()), "{:.0f}", most=0),
    ]
    print(*rows(figures), sep="\n")
    return exit_code(missed(figures))


def measure(node: Node, seconds: float) -> tuple[list[str], dict[str, set[str]]]:
    """Return the numbers advised while the run lasts, from the first one on, and afterwards by place."""
    script, stop = node.directory / "train.py", node.directory / "stop"
    script.write_text(SCRIPT)
    live: list[str] = []
    until = time.monotonic() + seconds
    command = [sys.executable, "-m", "torchperfd", "run", "--run", "steady", str(script), str(stop)]
    with subprocess.Popen(command, env=node.env, stderr=subprocess.PIPE, text=True) as process:
        while time.monotonic() < until and process.poll() is None:
            time.sleep(EVERY_S)
            answer = node.command("diagnose").stdout
            if live or advised(answer):
                live.append(" ".join(sorted(advised(answer))))
        stop.touch()
        errors = " ".join(process.communicate(timeout=TIMEOUT_S)[1].split())
    stop.unlink()
    card, _, trace = errors.partition("that the run captured by itself: ")
    return live, {"card": advised(card), "trace line": advised(trace), **afterwards(node, script, stop)}


def afterwards(node: Node, script: Path, stop: Path) -> dict[str, set[str]]:
    """Return the numbers that commands print after the run."""
    page = node.directory / "page.html"
    found = {}
    for path in sorted(node.captures.glob("2*/analysis.json"))[-1:]:
        capture = path.parent.name
        found["analyze"] = advised(node.command("analyze", capture).stdout)
        node.command("analyze", capture, "--html", str(page))
        found["HTML"] = advised(page.read_text())
    kept = json.loads(node.command("runs", "show", "steady", "--json").stdout)
    found["kept run"] = advised(kept["verdict"]["fix"])
    options = ("--only", "loader", "--seconds", "0.3", "--limit", "25", "--json")
    tuned = json.loads(node.command("tune", *options, str(script), str(stop), timeout=TIMEOUT_S).stdout)
    found["tune"] = {str(tuned["advised_workers"])} if tuned.get("advised_by") == "steady" else set()
    return found


def advised(text: str) -> set[str]:
    return set(re.findall(r"num_workers=(\d+)", text))


if __name__ == "__main__":
    sys.exit(main())
