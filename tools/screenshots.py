"""Draws the pictures of the terminal and of the live page in docs/images.

``make screenshots`` starts `torchperfd serve --demo`, waits until it shows a fault, and takes pictures of
`torchperfd top` and of the page. Then it trains on two ranks, one of which is slow, and takes pictures of
`torchperfd top` beside it and of the end of `torchperfd run`. It takes up to five minutes, on a machine
that does nothing else: on a busy one the verdicts name other causes as well.
"""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402
from tests.support.node import Node, new_node  # noqa: E402
from tests.support.terminal import Terminal  # noqa: E402
from tools.pictures import save  # noqa: E402
from tools.terminal_picture import DimScreen, page_of  # noqa: E402

EXAMPLE: Final = ROOT / "client" / "examples" / "train_uneven_ranks.py"
TOP: Final = "torchperfd top"
RUN: Final = "torchrun --standalone --nproc-per-node 2 -m torchperfd run train.py"
COLUMNS: Final = 100
ROWS: Final = 30
# The rows of `top` for two ranks and no GPU.
ROWS_OF_TWO_RANKS: Final = 17
PAGE: Final = (1280, 1000)
# The simulated loaders starve within the first two minutes, or a simulated GPU throttles.
FAULT_WITHIN_S: Final = 200
# So long a fault is watched before the picture, for the heat map and for means of it alone.
WATCHED_S: Final = 8
RUN_WITHIN_S: Final = 180
_VERDICT: Final = "document.querySelector('.verdict-head .chip.bad')"
# The bottom of the last card that the window shows whole.
_WHOLE_CARDS: Final = """Math.ceil(Math.max(...[...document.querySelectorAll('.card')]
  .map((card) => card.getBoundingClientRect().bottom).filter((bottom) => bottom < innerHeight))) + 8"""


@contextlib.contextmanager
def terminal(node: Node, command: str, rows: int, directory: Path) -> Iterator[Terminal]:
    """Run a command line on a terminal; it is ended, with all that it started, if it outlives the block."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{node.env['PATH']}"
    screen = DimScreen(COLUMNS, rows)
    env = {**node.env, "PATH": path}
    started = Terminal(shlex.split(command), env, COLUMNS, rows, directory, screen)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(started.pid, signal.SIGTERM)
            os.waitpid(started.pid, 0)


def draw_terminal(browser: Browser, name: str, shown: str) -> None:
    """Save a picture of a terminal, which is given as a page."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "terminal.html"
        page.write_text(shown, encoding="utf-8")
        browser.look_like(*PAGE)
        browser.open(page)
        width, height = browser.run("[document.body.offsetWidth, document.body.offsetHeight]")
        browser.look_like(width, height, scale=2)
        browser.drawn()
        save(name, browser.screenshot())


def draw_window(browser: Browser, name: str, scheme: str) -> None:
    """Save a picture of the page's window, which ends below the last card that is whole."""
    browser.drawn()
    width, _ = PAGE
    browser.look_like(width, browser.run(_WHOLE_CARDS), scheme)
    # Two drawings, the second with the new size and colours for certain.
    time.sleep(1)
    browser.drawn()
    save(name, browser.screenshot())


def draw_demo(browser: Browser, node: Node) -> None:
    """Draw `top` and the page of a simulated node, once its run has a fault."""
    browser.look_like(*PAGE)
    browser.visit(f"http://127.0.0.1:{node.metrics_port}/#/run/demo")
    with terminal(node, TOP, ROWS, node.directory) as top:
        deadline = time.monotonic() + FAULT_WITHIN_S
        while not browser.run(f"Boolean({_VERDICT})"):
            if time.monotonic() > deadline:
                raise SystemExit("the simulated node showed no fault")
            time.sleep(0.5)
        time.sleep(WATCHED_S)
        top.until(lambda lines: any("✗ input-bound" in line for line in lines))
        simulated = page_of(top.shown, TOP)
        draw_window(browser, "page-run.png", "light")
        browser.look_like(*PAGE, "dark")
        browser.run("document.querySelector('#stream').nextElementSibling.scrollIntoView()")
        time.sleep(1)
        draw_window(browser, "page-charts.png", "dark")
        top.end()
    draw_terminal(browser, "terminal-top.png", simulated)


def names_the_slow_rank(lines: list[str]) -> bool:
    """Return whether the first verdict that `top` shows is on rank 1."""
    verdicts = [line for line in lines if "✗" in line]
    return bool(verdicts) and "input-bound · rank 1" in verdicts[0]


def draw_real_run(browser: Browser, node: Node) -> None:
    """Draw `top` beside two real ranks, one of them slow, and the end of their run."""
    script = node.directory / "train.py"
    shutil.copy(EXAMPLE, script)
    with terminal(node, RUN, ROWS, node.directory) as run:
        deadline = time.monotonic() + RUN_WITHIN_S
        while node.command("ps").returncode:
            if time.monotonic() > deadline:
                raise SystemExit(f"the run did not begin:\n{run.drawn}")
            time.sleep(1)
        with terminal(node, TOP, ROWS_OF_TWO_RANKS, node.directory) as top:
            top.until(names_the_slow_rank)
            time.sleep(WATCHED_S)
            top.until(names_the_slow_rank)
            frame = page_of(top.shown, TOP)
            top.end()
        code, output = run.ended(RUN_WITHIN_S)
        if code or "INPUT-BOUND\x1b[0m · rank 1" not in output:
            raise SystemExit(f"the run ended with {code} and without the slow rank:\n{output}")
    draw_terminal(browser, "terminal-top-ranks.png", frame)
    draw_terminal(browser, "terminal-run.png", page_of(run.shown, RUN))


def main() -> None:
    """Draw all pictures."""
    with Browser(online=True) as browser:
        with new_node() as node:
            node.start_daemon("--demo")
            draw_demo(browser, node)
        with new_node() as node:
            draw_real_run(browser, node)


if __name__ == "__main__":
    main()
