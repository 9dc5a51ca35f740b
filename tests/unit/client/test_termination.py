"""SIGTERM in a process whose run is to be concluded first."""

import signal
import subprocess
import sys

import pytest

from torchperfd.launch import script as script_module

pytestmark = pytest.mark.skipif(not script_module.HANDLES_SIGTERM, reason="its C module is not compiled")

BEGIN = """
import os, signal, sys, threading, time
from torchperfd.launch import _sigterm
from torchperfd.launch.script import TerminationWatch
def terminate(): os.kill(os.getpid(), signal.SIGTERM)
def say(*words): print(*words, flush=True)
watch = TerminationWatch(lambda: say("concluded", threading.current_thread().name))
"""


def run(script: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_termination_in_script_concludes_and_kills() -> None:
    code, lines = run("watch.begin(); say(signal.getsignal(15)); terminate(); time.sleep(60)")
    assert code == -signal.SIGTERM
    assert lines == ["0", "concluded torchperfd-sigterm"]


def test_termination_after_script_waits_for_main_thread() -> None:
    code, lines = run("watch.begin(); watch.claim(); terminate(); time.sleep(0.2); say('done'); watch.end()")
    assert (code, lines) == (-signal.SIGTERM, ["done"])


def test_termination_before_claim_ends_main_thread() -> None:
    code, lines = run("watch.begin(); terminate(); time.sleep(0.3); watch.claim(); say('both')")
    assert (code, lines) == (-signal.SIGTERM, ["concluded torchperfd-sigterm"])


def test_termination_failing_conclusion_still_kills() -> None:
    done = run(
        "watch = TerminationWatch(lambda: [][0]); sys.stderr = sys.stdout; "
        "watch.begin(); terminate(); time.sleep(60)"
    )
    assert done == (-signal.SIGTERM, ["torchperfd: the report could not be made: list index out of range"])


def test_termination_unused_ends_as_without_it() -> None:
    code, lines = run("watch.begin(); watch.claim(); watch.end(); say('end'); sys.exit(3)")
    assert (code, lines) == (3, ["end"])
    assert run("watch.begin(); watch.claim(); watch.end(); terminate(); time.sleep(60)") == (
        -signal.SIGTERM,
        [],
    )


def test_termination_second_signal_kills_at_once() -> None:
    """Without a thread that concludes, only the second signal can end it before the minute is over."""
    code, lines = run(
        "_sigterm.install(60.0); terminate(); terminate(); say('same request'); time.sleep(0.6); "
        "terminate(); time.sleep(30); say('alive')"
    )
    assert (code, lines) == (-signal.SIGTERM, ["same request"])


def test_termination_deadline_kills_stuck_process() -> None:
    code, lines = run("import ctypes; _sigterm.install(0.6); terminate(); ctypes.PyDLL(None).sleep(60)")
    assert (code, lines) == (-signal.SIGTERM, [])


@pytest.mark.parametrize("action", ["signal.SIG_IGN", "lambda *_: say('mine')"])
def test_termination_leaves_earlier_action_alone(action: str) -> None:
    code, lines = run(f"signal.signal(15, {action}); watch.begin(); terminate(); say('goes on')")
    assert code == 0
    assert lines[-1] == "goes on"
    assert lines[:-1] == ([] if "IGN" in action else ["mine"])


def test_termination_leaves_later_handler_alone() -> None:
    code, lines = run(
        "watch.begin(); say(signal.signal(15, lambda *_: sys.exit(7))); terminate(); time.sleep(60)"
    )
    assert (code, lines) == (7, ["0"])


@pytest.mark.parametrize(
    "child",
    [
        "pid = os.fork()",
        # A fork that Python does not know of: only the handler itself can see it.
        "import ctypes; pid = ctypes.PyDLL(None).fork()",
    ],
)
def test_termination_of_forked_child_is_as_before(child: str) -> None:
    code, lines = run(
        f"watch.begin(); {child}\n"
        "if not pid: time.sleep(60)\n"
        "time.sleep(0.2); os.kill(pid, 15); say(os.waitpid(pid, 0)[1])\n"
        "watch.claim(); watch.end(); say('end')"
    )
    assert (code, lines) == (0, ["15", "end"])
