"""Whether ten million steps fit into the memory of one million.

    make bench-memory
    python -m benchmarks.memory_flat --steps 1000000

Writes on the ring buffer what the hooks write of plain training steps, in a process without torch and
without a daemon, which is when most piles up, and lets the flusher drain at its usual pace of
steps. Prints the resident memory along the way; exits 1 when it grows by more than 2 MB
between the first tenth and the end, or when a step is missing from the account.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil
from benchmarks.plain_step import plain_step

import torchperfd
from torchperfd.events import EventBuffer

LIMIT_MB: Final = 2.0
STEPS_PER_DRAIN: Final = 1000
SAMPLES: Final = 10


def train(buffer: EventBuffer, steps: int) -> None:
    for _ in range(steps):
        plain_step(buffer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHPERFD_SOCKET"] = str(Path(directory) / "absent.sock")
        client = torchperfd.attach(job="memory_flat")
    buffer = client.parts.instruments.buffer
    process = psutil.Process()
    resident_mb: list[float] = []
    began = time.monotonic()
    fed = 0
    for sample in range(1, SAMPLES + 1):
        until = steps * sample // SAMPLES
        highest = 0
        while fed < until:
            some = min(STEPS_PER_DRAIN, until - fed)
            train(buffer, some)
            fed += some
            client.report()
            highest = max(highest, process.memory_info().rss)
        resident_mb.append(highest / 1e6)
        print(f"{until:>12,} steps {resident_mb[-1]:>8.2f} MB {time.monotonic() - began:>6.0f} s", flush=True)
    grown = resident_mb[-1] - resident_mb[0]
    print(f"grown by {grown:+.2f} MB since {steps // SAMPLES:,} steps, limit {LIMIT_MB:.0f} MB")
    client.detach()
    seen = client.report().to_dict()["train"]["steps"]
    if seen != steps:
        print(f"FAILED: the account has {seen:,} of {steps:,} steps")
        return 1
    return 1 if grown > LIMIT_MB else 0


if __name__ == "__main__":
    sys.exit(main())
