"""How much later a script exits under torchperfd, whatever has become of the daemon.

    make bench-exit

Interleaved rounds; the time from the script's last step to its process being gone, beside
plain Python in the same run. Exits 1 when a median delay is above one second.
"""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.support.node import Node, eventually

ROUNDS: Final = 5
LIMIT_S: Final = 1.0
SCRIPT: Final = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 8))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def epoch():
    for (x,) in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
epoch()
print("ready", flush=True)
sys.stdin.readline()
epoch()
"""
MODES: Final = ("plain python", "no daemon", "daemon", "embedded daemon", "daemon killed", "daemon stopped")


def exit_seconds(mode: str, script: Path) -> float:
    """Return how long the script takes to end after the request."""
    node = Node()
    try:
        if mode.startswith("daemon"):
            node.start_daemon()
        command = [sys.executable, str(script)]
        if mode != "plain python":
            options = [] if mode == "embedded daemon" else ["--no-daemon"]
            command = [sys.executable, "-m", "torchperfd", "run", *options, str(script)]
        with subprocess.Popen(
            command,
            env=node.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            if mode.endswith("daemon") and mode not in ("no daemon", "plain python"):
                eventually(lambda: node.json("ps")["runs"], 20)
            if mode == "daemon killed":
                node.stop_daemon(signal.SIGKILL)
            if mode == "daemon stopped":
                assert node.daemon is not None
                node.daemon.send_signal(signal.SIGSTOP)
            began = time.perf_counter()
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait()
            return time.perf_counter() - began
    finally:
        node.close()


def main() -> int:
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(SCRIPT)
        for _ in range(ROUNDS):
            for mode in MODES:
                times[mode].append(exit_seconds(mode, script))
    plain = statistics.median(times["plain python"])
    worst = 0.0
    print(f"{'':<18} {'median':>8} {'longest':>8} {'delay':>8}")
    for mode, taken in times.items():
        delay = statistics.median(taken) - plain
        worst = max(worst, delay)
        print(f"{mode:<18} {statistics.median(taken):>6.2f} s {max(taken):>6.2f} s {delay:>6.2f} s")
    return 1 if worst > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
