"""What ``torchperfd run`` adds beside the script: a daemon if the node has no service, and one capture.

The daemon is a child process. The capture is made once, when the verdict is worth explaining.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from torchperfd.errors import CaptureError
from torchperfd.link.stream import find_listener
from torchperfd.model.formatting import duration
from torchperfd.model.own_commands import own_command
from torchperfd.safety.logs import log
from torchperfd.v1 import access, contract

if TYPE_CHECKING:
    from torchperfd.captures.job_capture import JobCapture
    from torchperfd.client import Client
    from torchperfd.v1 import control_pb2


STEPS: Final = 5
"""Fewer are captured where training would pause for a second or more afterwards."""
MIN_SHARE: Final = 0.1
"""A verdict that costs a smaller share of the step is not worth a capture."""
STABLE_LOOKS: Final = 3
"""So many consecutive looks have to find the same cause on the same rank."""
LOOK_EVERY_S: Final = 5.0
_ANSWER_S: Final = 1.0
_MAX_ANALYSIS_BYTES: Final = 4 * 2**20
_NOTHING_TO_CAPTURE: Final = frozenset({"none", "unknown", "hang"})
_STEPS_WORDS: Final = ("no step", "one step", "two steps", "three steps", "four steps", "five steps")
_ANALYSIS: Final = "analysis.json"
_CUDA_DRIVER: Final = "/dev/nvidiactl"


def begin(client: "Client", *, quiet: bool, switched_off: bool) -> "AutoCapture | None":
    """Begin to look for something worth a capture; None where no capture is wanted.

    That is: it is switched off, the end of the run shows nothing, or this is not rank 0.
    """
    if quiet or switched_off or os.environ.get("TORCHPERFD_NO_ADVISE") or Path(_CUDA_DRIVER).exists():
        return None
    # On every rank, since rank 0 may have any of them captured. Kineto reads it when the profiler starts for
    # the first time, and otherwise writes into the script's output.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if client.rank != 0:
        return None
    auto = AutoCapture(client, LOOK_EVERY_S)
    auto.start()
    return auto


class StableVerdict:
    """Decides when a verdict is worth a capture. Pure."""

    def __init__(self) -> None:
        self._found: tuple[str, int] | None = None
        self._looks = 0

    def update(self, verdict: "control_pb2.Verdict | None") -> bool:
        """Take the verdict of one look; return whether it is large and has lasted long enough."""
        step = verdict.step_seconds if verdict is not None else 0.0
        if (
            verdict is None
            or verdict.cause in _NOTHING_TO_CAPTURE
            or not step
            or verdict.cost_seconds_per_step < MIN_SHARE * step
        ):
            self._found, self._looks = None, 0
            return False
        found = (verdict.cause, verdict.rank)
        self._looks = self._looks + 1 if found == self._found else 1
        self._found = found
        return self._looks >= STABLE_LOOKS


class AutoCapture:
    """Looks at the verdict from a thread of its own, and captures once. Only on rank 0.

    Never on a CUDA device: a first capture there leaves CUPTI in the process, which costs launches time.

    Args:
        every: Seconds between two looks.
    """

    def __init__(self, client: "Client", every: float) -> None:
        self._client, self._every = client, every
        self._stable = StableVerdict()
        self._stopping = threading.Event()
        self._capture: JobCapture | None = None

    def start(self) -> None:
        threading.Thread(target=self.run, name="torchperfd-advise", daemon=True).start()

    def stop(self) -> None:
        """Look no more; returns at once. A capture in progress ends as any does."""
        self._stopping.set()

    @property
    def capture_id(self) -> str:
        """The id of the capture; empty while there is no trace."""
        capture = self._capture
        return capture.id if capture is not None and capture.has_trace else ""

    def trace_words(self) -> str:
        """Return the first advice on the capture, for the end of the run; empty without advice."""
        capture = self._capture
        if capture is None:
            return ""
        advice = first_advice(
            self._client.parts.daemon_session.read_capture(capture.id, _ANALYSIS, _MAX_ANALYSIS_BYTES)
        )
        start, end = capture.step_range or (0, STEPS)
        return f"{_STEPS_WORDS[end - start]} that the run captured by itself: {advice}" if advice else ""

    def run(self) -> None:
        """Look at the run now and then, until a capture was ordered or the run ends."""
        while not self._stopping.wait(self._every):
            try:
                if self.look():
                    return
            except Exception as error:  # noqa: BLE001 - training goes on
                log.info("no capture is made by itself: %s", error)
                return

    def look(self) -> bool:
        """Look at the verdict, and capture if it is time; return whether there is nothing left to do."""
        if _uses_cuda():
            return True
        answer = self._client.whole_run(_ANSWER_S)
        verdict = answer.verdict if answer is not None and answer.HasField("verdict") else None
        if not self._stable.update(verdict) or self._stopping.is_set():
            return False
        here = {rank.identity.rank for rank in answer.ranks} if answer is not None else set()
        wanted = verdict.rank if verdict is not None and verdict.rank in here else self._client.rank
        try:
            self._capture = self._client.order_automatic_capture(STEPS, wanted)
        except CaptureError as error:
            log.info("no capture is made by itself: %s", error)
        return True


def first_advice(analysis: bytes) -> str:
    """Return the first advice of an analysis in one line; empty if there is none, or it cannot be read."""
    try:
        document: Any = json.loads(analysis)
        first = document["advice"][0]
        setting = f": {first['setting']}" if first["setting"] else ""
        line = f"{first['change']}{setting}"
        saves = float(first["saves_us_per_step"]) / 1e6
        saved = f", saves about {duration(saves)} a step" if saves > 0 else ""
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    words = f"{line}{saved}"
    return words if words.isprintable() else ""


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized: Callable[[], bool] | None = getattr(cuda, "is_initialized", None)
    return is_initialized is not None and is_initialized()


class EmbeddedDaemon:
    """A daemon that this process started. It listens on loopback and a private socket only.

    It lives until its owner has closed the pipe to it (or died) and no other rank is
    connected any more.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def leave(self, timeout: float) -> None:
        """Close the pipe to the daemon: it stops once unused. Waits up to ``timeout`` seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # Another rank may still use it; then it goes on after this process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


def start_unless_one_answers() -> EmbeddedDaemon | None:
    """Start a daemon when the node has none; return it, or None when none was needed or possible.

    Does not wait for it: the client connects when it is up.
    """
    if any(find_listener(path) for path in contract.socket_candidates()):
        return None
    socket_path = os.environ.get("TORCHPERFD_SOCKET") or contract.user_socket()
    log_path = Path(socket_path).parent / "embedded.log"
    try:
        with _open_log(log_path) as output:
            process = subprocess.Popen(
                own_command("torchperfd_daemon", "serve", "--embedded", "--socket", socket_path),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C in the terminal is meant for the script.
                start_new_session=True,
            )
    except OSError as error:
        log.warning("cannot start a daemon: %s; steps are timed in this process only", error)
        return None
    return EmbeddedDaemon(process, log_path)


def _open_log(path: Path) -> BinaryIO:
    """Open the daemon's log for appending, in a directory that is made if need be.

    Raises:
        OSError: It cannot be opened, or other users could have put something in its place.
    """
    with access.opened_directory(str(path.parent), create=True) as directory:
        return open(path, "ab", opener=lambda _, flags: access.open_file(directory, path.name, flags))
