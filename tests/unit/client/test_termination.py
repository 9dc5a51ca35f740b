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


ENDED = -signal.SIGTERM
CONCLUDED = "concluded torchperfd-sigterm"


@pytest.mark.parametrize(
    ("script", "code", "lines"),
    [
        ("watch.begin(); say(signal.getsignal(15)); terminate(); time.sleep(60)", ENDED, ["0", CONCLUDED]),
        # After the script has ended, it waits for the main thread; before, it ends that.
        (
            "watch.begin(); watch.claim(); terminate(); time.sleep(0.2); say('done'); watch.end()",
            ENDED,
            ["done"],
        ),
        ("watch.begin(); terminate(); time.sleep(0.3); watch.claim(); say('both')", ENDED, [CONCLUDED]),
        # A conclusion that fails.
        (
            "watch = TerminationWatch(lambda: [][0]); sys.stderr = sys.stdout; "
            "watch.begin(); terminate(); time.sleep(60)",
            ENDED,
            ["torchperfd: the report could not be made: list index out of range"],
        ),
        # Unused, it ends as without it.
        ("watch.begin(); watch.claim(); watch.end(); say('end'); sys.exit(3)", 3, ["end"]),
        ("watch.begin(); watch.claim(); watch.end(); terminate(); time.sleep(60)", ENDED, []),
        # Without a thread that concludes, only the second signal can end it before the minute is over.
        (
            "_sigterm.install(60.0); terminate(); terminate(); say('same request'); time.sleep(0.6); "
            "terminate(); time.sleep(30); say('alive')",
            ENDED,
            ["same request"],
        ),
        # The deadline ends a process that is stuck.
        ("import ctypes; _sigterm.install(0.6); terminate(); ctypes.PyDLL(None).sleep(60)", ENDED, []),
        # Actions of the script, from before and from later.
        ("signal.signal(15, signal.SIG_IGN); watch.begin(); terminate(); say('goes on')", 0, ["goes on"]),
        (
            "signal.signal(15, lambda *_: say('mine')); watch.begin(); terminate(); say('goes on')",
            0,
            ["mine", "goes on"],
        ),
        (
            "watch.begin(); say(signal.signal(15, lambda *_: sys.exit(7))); terminate(); time.sleep(60)",
            7,
            ["0"],
        ),
    ],
)
def test_termination_ends_a_script_once_it_is_concluded(script: str, code: int, lines: list[str]) -> None:
    assert run(script) == (code, lines)


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
