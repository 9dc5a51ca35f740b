"""What the live page weighs, and how fast it is: ``python -m benchmarks.page [--ranks N]``.

A server with made-up documents serves the page to a headless Chromium. Printed are the page's weight without
compression, the time to its first paint, and the script time of one drawing of a run's view with ten minutes
of every rank. The page is opened several times; the median is printed, and the best, which the rest of the
machine disturbs least. Bounds: 300 kB, 1 s, 100 ms for 64 ranks; exits 1 beyond one of them.
"""

import argparse
import statistics
import sys
from importlib.resources import files
from typing import Final

from tests.browser import Browser
from tests.support.page_feed import PageFeed
from tests.support.page_server import serve_page

WEIGHT_BYTES: Final = 300_000
FIRST_PAINT_MS: Final = 1000.0
DRAWING_MS: Final = 100.0
ROUNDS: Final = 5
_DRAWINGS: Final = (
    "performance.getEntriesByName('draw').map((each) => each.duration).filter((each) => each > 2)"
)
_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def weight() -> int:
    """Return the bytes of all files of the page."""
    folder = files("torchperfd_daemon.web").joinpath("assets")
    return sum(len(each.read_bytes()) for each in folder.iterdir())


def measure(ranks: int) -> tuple[list[float], list[float]]:
    """Return first paints and drawings in milliseconds, one of each per opening of the page."""
    paints, drawings = [], []
    with serve_page(PageFeed(ranks=ranks)) as url, Browser(online=True) as browser:
        browser.look_like(1280)
        for _ in range(ROUNDS):
            browser.visit("about:blank")
            browser.visit(f"{url}/#/run/demo")
            paints.append(browser.wait_for(_PAINT, "the first paint"))
            browser.wait_for(f"{_DRAWINGS}.length >= 4", "four drawings")
            drawings.append(statistics.median(browser.run(_DRAWINGS)))
    return paints, drawings


def main() -> int:
    """Print the figures; return 1 if one is beyond its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    ranks = parser.parse_args().ranks
    paints, drawings = measure(ranks)
    bytes_ = weight()
    row = "{:<42} {:>9} {:>9} {:>9}"
    print(row.format("", "median", "best", "bound"))
    print(row.format("weight of all files, kB", f"{bytes_ / 1000:.0f}", "", f"{WEIGHT_BYTES / 1000:.0f}"))
    for name, values, bound in (
        ("first paint, ms", paints, FIRST_PAINT_MS),
        (f"script of a drawing, {ranks} ranks, 10 min, ms", drawings, DRAWING_MS),
    ):
        print(row.format(name, f"{statistics.median(values):.0f}", f"{min(values):.0f}", f"{bound:.0f}"))
    beyond = bytes_ > WEIGHT_BYTES or min(paints) > FIRST_PAINT_MS or min(drawings) > DRAWING_MS
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
