"""Faults of the daemon, or of the captures directory, during a trial."""

import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.support.node import Node


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        daemon: Whether a daemon runs when the script begins.
        before: Called before the script begins.
        during: Called once the script trains.
        env: Added to the script's environment.
    """

    daemon: bool = True
    before: Callable[[Node], None] = lambda _: None
    during: Callable[[Node], None] = lambda _: None
    env: Mapping[str, str] = field(default_factory=dict)


def _kill(node: Node) -> None:
    node.stop_daemon(signal.SIGKILL)


def _stop(node: Node) -> None:
    assert node.daemon is not None
    node.daemon.send_signal(signal.SIGSTOP)


def _restart(node: Node) -> None:
    node.stop_daemon(signal.SIGKILL)
    node.start_daemon(wait=False)


def _link_captures(node: Node) -> None:
    elsewhere = node.directory / "elsewhere"
    elsewhere.mkdir()
    node.captures.symlink_to(elsewhere)


def _put_file_in_place(node: Node) -> None:
    node.captures.write_text("no directory")


def _delete_captures(node: Node) -> None:
    shutil.rmtree(node.captures, ignore_errors=True)


def _listen_without_answer(node: Node) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(node.socket))
    listener.listen(64)
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                kept.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()


def _answer_slowly(node: Node) -> None:
    assert node.daemon is not None
    for _ in range(6):
        node.daemon.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        node.daemon.send_signal(signal.SIGCONT)
        time.sleep(0.02)


FAULTS: Final[dict[str, Fault]] = {
    "none": Fault(),
    "absent": Fault(daemon=False),
    "killed": Fault(during=_kill),
    "stopped": Fault(during=_stop),
    "restarted": Fault(during=_restart),
    "slow": Fault(during=_answer_slowly),
    "mute": Fault(daemon=False, before=_listen_without_answer),
    "capturing": Fault(env={"TRIAL_CAPTURES": "1"}),
    "capture storm": Fault(env={"TRIAL_CAPTURES": "20"}),
    "captures deleted": Fault(during=_delete_captures, env={"TRIAL_CAPTURES": "1"}),
    "captures linked": Fault(daemon=False, before=_link_captures, env={"TRIAL_CAPTURES": "1"}),
    "captures no directory": Fault(daemon=False, before=_put_file_in_place, env={"TRIAL_CAPTURES": "1"}),
    "captures disk full": Fault(env={"TRIAL_CAPTURES": "1", "TRIAL_FILE_BYTES": "20000"}),
}
