"""Draws the pictures of the live page in docs/images, from the simulated node.

``make screenshots`` starts `torchperfd serve --demo`, waits until it shows a fault, and takes the pictures in
headless Chromium, which takes up to three minutes.
"""

import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402
from tests.support.node import new_node  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
# The simulated loaders starve within the first two minutes, or a simulated GPU throttles.
FAULT_WITHIN_S: Final = 200
_VERDICT: Final = "document.querySelector('.verdict-head .chip.bad')"


def draw(url: str, browser: Browser) -> None:
    """Take the pictures once the run has a fault."""
    browser.look_like(1280, 1000)
    browser.visit(f"{url}/#/run/demo")
    deadline = time.monotonic() + FAULT_WITHIN_S
    while not browser.run(f"Boolean({_VERDICT})"):
        if time.monotonic() > deadline:
            raise SystemExit("the simulated node showed no fault")
        time.sleep(0.5)
    # Some seconds of it, for the heat map.
    time.sleep(8)
    browser.drawn()
    (IMAGES / "page-run.png").write_bytes(browser.screenshot())
    browser.look_like(1280, 1000, "dark")
    browser.run("document.querySelector('#stream').nextElementSibling.scrollIntoView()")
    # Two drawings, the second with the new colours for certain.
    time.sleep(1)
    browser.drawn()
    (IMAGES / "page-charts.png").write_bytes(browser.screenshot())


def main() -> None:
    """Start a simulated node and a browser, and draw."""
    IMAGES.mkdir(exist_ok=True)
    with new_node() as node, Browser(online=True) as browser:
        node.start_daemon("--demo")
        draw(f"http://127.0.0.1:{node.metrics_port}", browser)
    for image in sorted(IMAGES.glob("page-*.png")):
        print(f"{image.relative_to(ROOT)}: {image.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
