"""The audit log: one line for each request that acts on a process or a file, after it was decided."""

import logging
from collections.abc import Iterable
from typing import Final

from torchperfd.v1 import control_pb2
from torchperfd_daemon.errors import NotAllowedError, TorchperfdError
from torchperfd_daemon.rpc.callers import Caller
from torchperfd_daemon.text import one_line

log = logging.getLogger("torchperfd.audit")

_MAX_CHARACTERS: Final = 120
_MAX_LOGGED: Final = 20


class AuditLine:
    """The line of one request; only the first outcome is written.

    Args:
        action: What was requested, such as ``capture``.
        subject: What it is about, such as ``all ranks of run baseline``.
    """

    def __init__(self, action: str, subject: str, caller: Caller) -> None:
        self._request = f"{action} of {one_line(subject, _MAX_CHARACTERS)} by {caller}"
        self._is_written = False

    def allowed(self, owners: Iterable[int | None] = (), capture_id: str = "") -> None:
        """Write that the request is allowed, and begins.

        Args:
            owners: The users of the processes or files that it acts on.
            capture_id: Of the capture that it makes, if any.
        """
        users = [
            "unknown" if uid is None else str(uid) for uid in sorted(set(owners), key=lambda uid: uid or -1)
        ]
        owned = f", owner {' and '.join(users)}" if users else ""
        capture = f", capture {one_line(capture_id, _MAX_CHARACTERS)}" if capture_id else ""
        self._write(logging.INFO, f"allowed{owned}{capture}")

    def failed(self, error: TorchperfdError) -> None:
        """Write why the request was refused, or could not be carried out."""
        refused = isinstance(error, NotAllowedError)
        level, outcome = (logging.WARNING, "refused") if refused else (logging.INFO, "failed")
        self._write(level, f"{outcome}: {one_line(error.problem, _MAX_CHARACTERS)}")

    def end(self) -> None:
        """Write that the caller left, unless the request was decided before."""
        self._write(logging.INFO, "failed: the caller left before it was decided")

    def _write(self, level: int, outcome: str) -> None:
        if not self._is_written:
            self._is_written = True
            log.log(level, "%s: %s", self._request, outcome)


def subject_of(request: control_pb2.CaptureRequest | control_pb2.StacksRequest) -> str:
    """Return what a request is about, for the log."""
    job = request.job if isinstance(request, control_pb2.CaptureRequest) else ""
    named = [f"{kind} {name}" for kind, name in (("run", request.run), ("job", job)) if name]
    ranks = f"ranks {', '.join(map(str, request.ranks[:_MAX_LOGGED]))}" if request.ranks else "all ranks"
    return " ".join((ranks, "of", *(named or ["the caller's only run"])))
