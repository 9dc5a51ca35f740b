"""What the daemon costs by the number of ranks: ``python -m benchmarks.daemon.density [--ranks 0 8 64]``.

Each rank is a process that makes ten steps a second and reports once a second, as clients do. The page is
scraped every 5 s. Each number has a daemon of its own, with eight GPUs of a fake driver. Printed are a table
and the size of a report.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.daemon.__main__ import (
    REPORTS_PER_SECOND,
    SETTLE_S,
    STEPS_PER_SECOND,
    daemon,
    fetch,
    pid_of,
    ranks,
    scraped,
    series,
)
from benchmarks.daemon.rank import Script
from benchmarks.daemon.watch import MIB, watch

SCRAPES = 10
SCRAPE_PACE_S = 1.0


def row(count: int, seconds: float, *options: str) -> str:
    """Measure a daemon with so many ranks; return the row of the table."""
    pace = (str(STEPS_PER_SECOND), str(REPORTS_PER_SECOND), str(max(1, count)))
    with daemon(*options) as node, ranks(node, count, *pace):
        with scraped(node):
            time.sleep(SETTLE_S)
            cost = watch(pid_of(node), seconds)
        port = node.metrics_port
        took = []
        for _ in range(SCRAPES):
            time.sleep(SCRAPE_PACE_S)
            began = time.monotonic()
            page = fetch(port, {})
            took.append(time.monotonic() - began)
        zipped = fetch(port, {"Accept-Encoding": "gzip"})
        cells = (
            str(count),
            f"{cost.cores:.2%}",
            f"{cost.peak_bytes / MIB:.0f} MiB",
            str(series(port)),
            f"{len(page) / 1e3:.0f} kB; {len(zipped) / 1e3:.0f} kB",
            f"{statistics.median(took) * 1e3:.0f} ms",
        )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 8, 64], help="numbers of ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each is watched")
    parser.add_argument("options", nargs="*", help="options of serve, after --")
    given = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {Path('/proc/loadavg').read_text().split()[0]} before the start")
    report = Script(0).report(STEPS_PER_SECOND // REPORTS_PER_SECOND, 10**9 // STEPS_PER_SECOND)
    print(f"a report has {report.ByteSize():,} bytes\n")
    print("| ranks | of a core | memory | series | page; compressed | scrape |\n|---|---|---|---|---|---|")
    for count in given.ranks:
        print(row(count, given.seconds, *given.options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
