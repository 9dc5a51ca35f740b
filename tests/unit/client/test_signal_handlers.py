"""A signal handler or a forked child may call whatever a script may call, wherever it interrupts."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import torchperfd


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _in_handler(call: Callable[[], object], loop: Callable[[], object], times: int = 50) -> None:
    """Have a handler call one thing again and again, while the loop does another."""
    called = 0

    def handler(*_: object) -> None:
        nonlocal called
        call()
        called += 1
        signal.setitimer(signal.ITIMER_REAL, 0.002)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002)
    deadline = time.monotonic() + 100
    while called < times and time.monotonic() < deadline:
        loop()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert called >= times


def test_report_in_handler_within_report_returns(client: torchperfd.Client) -> None:
    def step_and_report() -> None:
        client.step()
        str(client.report())

    _in_handler(lambda: str(client.report()), step_and_report)


def test_report_in_handler_within_the_first_one_is_whole() -> None:
    """The first report imports the layouts, which a handler must not find half there."""
    code = """
import signal
import subprocess
import sys
from torchperfd.report.rank import RankReport
from torchperfd.steps.phases import PhaseNames
from torchperfd.steps.totals import Totals
report, seen = RankReport(0, Totals(), PhaseNames()), []
signal.signal(signal.SIGALRM, lambda *_: seen.append(report.to_html() + str(report)))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
while not seen:
    str(report)
signal.setitimer(signal.ITIMER_REAL, 0)
print(set(seen) == {report.to_html() + str(report)})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_capture_in_handler_within_capture_returns(client: torchperfd.Client) -> None:
    def capture() -> None:
        with contextlib.suppress(torchperfd.CaptureError):
            client.capture(steps=1).cancel()

    _in_handler(capture, capture, times=10)


def test_attach_and_detach_in_handler_return(client: torchperfd.Client) -> None:
    def again() -> None:
        client.detach()
        torchperfd.attach()

    _in_handler(again, again, times=5)
    torchperfd.attach().detach()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_report_in_forked_child_returns(client: torchperfd.Client) -> None:
    for _ in range(1000):
        client.step()
    stop = threading.Event()

    def report() -> None:
        while not stop.is_set():
            client.report()

    thread = threading.Thread(target=report)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                str(client.report())
                client.step()
                client.detach()
                os._exit(7)
            deadline = time.monotonic() + 60
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.002)
            if not ended[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(ended[1]) == 7
    finally:
        stop.set()
        thread.join()
