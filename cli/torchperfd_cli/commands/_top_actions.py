"""What keys of ``top`` ask of the daemon: a capture, and stacks."""

import queue
import threading
from collections.abc import Callable
from typing import Final

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd.v1.contract import AUTOMATIC_CAPTURE_S
from torchperfd_cli.commands._daemon import connect
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.views.model import capture_state

_CAPTURE_STEPS: Final = 5
_CAPTURE_TIMEOUT_S: Final = 60.0
_STACKS_TIMEOUT_S: Final = 5.0


class TopActions:
    """Runs one action at a time.

    Args:
        socket: The socket of the daemon; None for the usual places.
        fleet: Whether ranks of all nodes are meant.
    """

    def __init__(self, socket: str | None, *, fleet: bool) -> None:
        self._socket, self._fleet = socket, fleet
        self._thread: threading.Thread | None = None
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What to say, the newest last."""
        self.texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Texts to show on a page of their own."""

    def capture(self, run: str, changed: Callable[[], None]) -> None:
        """Capture the next steps of a run.

        Args:
            changed: Called by a thread once there is something to show.
        """
        self._begin(lambda: self._capture(run, changed), changed)

    def stacks(self, run: str, changed: Callable[[], None]) -> None:
        self._begin(lambda: self._stacks(run, changed), changed)

    def _begin(self, action: Callable[[], None], changed: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.messages.put("the last action is still in progress")
            changed()
            return
        self._thread = threading.Thread(
            target=self._run, args=(action, changed), name="top-action", daemon=True
        )
        self._thread.start()

    def _run(self, action: Callable[[], None], changed: Callable[[], None]) -> None:
        try:
            action()
        except TorchperfdError as error:
            self.messages.put(f"! {error}")
        changed()

    def _capture(self, run: str, changed: Callable[[], None]) -> None:
        self.messages.put(f"capturing {_CAPTURE_STEPS} steps of {run} …")
        changed()
        options = session_pb2.CaptureOptions(steps=_CAPTURE_STEPS)
        request = control_pb2.CaptureRequest(
            run=run, options=options, timeout_seconds=_CAPTURE_TIMEOUT_S, fleet=self._fleet
        )
        with connect(self._socket) as daemon:
            for progress in daemon.Capture(request, timeout=_CAPTURE_TIMEOUT_S + AUTOMATIC_CAPTURE_S + 60):
                words = f"capture {progress.capture_id}: {capture_state(progress.state)}"
                if progress.state == control_pb2.CAPTURE_STATE_COMPLETE:
                    words += f"; torchperfd analyze {progress.capture_id}"
                elif progress.reason:
                    words += f", {progress.reason}"
                self.messages.put(words)
                changed()

    def _stacks(self, run: str, changed: Callable[[], None]) -> None:
        # Only here, so that `top` opens without these.
        from torchperfd.document.terminal import render
        from torchperfd_daemon.service import translate_diagnosis
        from torchperfd_daemon.stacks.merge import merge
        from torchperfd_daemon.stacks.report import stacks_document
        from torchperfd_daemon.views.documents import each_once

        self.messages.put(f"fetching the stacks of {run} …")
        changed()
        request = control_pb2.StacksRequest(run=run, timeout_seconds=_STACKS_TIMEOUT_S, fleet=self._fleet)
        with connect(self._socket) as daemon:
            messages = daemon.Stacks(request, timeout=_STACKS_TIMEOUT_S + 10)
            answers = [
                translate_diagnosis.rank_stacks_from_message(each)
                for each in messages
                if not each.HasField("unreachable")
            ]
        answers = each_once(answers)
        self.texts.put(render(stacks_document(run, answers, merge(answers))))
        self.messages.put("")
