"""Captures of several ranks: rank 0's script orders one, holds its handle and fetches the files."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from torchperfd.captures.files import CaptureFolder, CapturesDirectory
from torchperfd.captures.manager import analysis_of
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.link.outbox import Outbox
from torchperfd.safety.interrupts import Flag
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.captures.state import CaptureOptions
    from torchperfd.v1 import session_pb2


_RESULT_POLL_S: Final = 0.2
_DAEMON_GONE: Final = (
    "the daemon went away in the middle; what its ranks still write, `torchperfd captures list` shows"
)


class JobCapture:
    """A capture of several ranks in progress; training goes on meanwhile.

    Args:
        connection: Returns a number that changes when the daemon goes away, 0 while there is none.
        cancel: Has the order given up.
        fetch: Returns a folder that this process can read with files of a capture; see ``CaptureFetcher``.
    """

    def __init__(
        self,
        connection: Callable[[], int],
        cancel: Callable[[], None],
        fetch: Callable[[str, str, Iterable[str]], Path],
    ) -> None:
        self._connection = connection
        self._session = connection()
        self._cancel = cancel
        self._fetch = fetch
        self._newest: session_pb2.CaptureOrderResult | None = None
        self._ended = Flag()

    @property
    def id(self) -> str:
        """The capture's name, as ``torchperfd captures`` shows it; empty before the daemon has named it."""
        return self._newest.capture_id if self._newest is not None else ""

    @property
    def state(self) -> str:
        """One of ordered, preparing, armed, complete, partial, failed."""
        if not self._ended.is_set() and self._connection() != self._session:
            return "failed"
        return self._newest.state if self._newest is not None else "ordered"

    @property
    def step_range(self) -> tuple[int, int] | None:
        """First training step of the capture, and the first one after it; None before it is agreed."""
        newest = self._newest
        if newest is None or not newest.steps:
            return None
        return newest.start_step, newest.start_step + newest.steps

    @property
    def paths(self) -> dict[int, Path]:
        """The traces there are on this node, by rank; also of a capture that is partial.

        Empty before the end. ``nodes`` has the locations of the others. Of a service, traces are fetched into
        this user's own captures directory when this is read for the first time.

        Raises:
            CaptureError: They cannot be fetched.
        """
        newest = self._newest
        if newest is None or not newest.ended:
            return {}
        here = {each.rank: each.file for each in newest.ranks if _is_plain(each.file) and not each.node}
        if not here:
            return {}
        folder = self._fetch(newest.capture_id, newest.directory, here.values())
        return {rank: folder / name for rank, name in here.items()}

    @property
    def has_trace(self) -> bool:
        """Whether it has ended, and some rank of this node has a trace."""
        newest = self._newest
        return (
            newest is not None and newest.ended and any(each.file and not each.node for each in newest.ranks)
        )

    @property
    def nodes(self) -> dict[int, str]:
        """By rank, the node whose daemon keeps a trace that is not on this one, below the same id."""
        newest = self._newest
        if newest is None or not newest.ended:
            return {}
        return {each.rank: each.node for each in newest.ranks if each.file and each.node}

    @property
    def path(self) -> Path:
        """The directory of all traces; of a service, where this user's own copies are.

        Raises:
            CaptureError: Some rank has no trace, or not yet; the message names it. ``paths`` has the others.
                Or they cannot be fetched.
        """
        newest = self._newest
        if newest is None or not newest.ended:
            if self._connection() != self._session:
                raise CaptureError(_DAEMON_GONE)
            raise CaptureError(f"capture {self.id} is {self.state}; wait() for it")
        if newest.state != "complete":
            raise CaptureError(f"capture {self.id} {_outcome(newest)}")
        here = [each.file for each in newest.ranks if _is_plain(each.file) and not each.node]
        return self._fetch(newest.capture_id, newest.directory, here)

    def wait(self, timeout: float | None = 60.0) -> Path:
        """Wait for all traces, from a thread that does not train; return their directory.

        Raises:
            CaptureError: Some rank has no trace; the message names it. ``paths`` has the others.
            CaptureTimeoutError: It did not end within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(_RESULT_POLL_S if deadline is None else _until(deadline)):
            if self._connection() != self._session:
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise CaptureTimeoutError(
                    f"capture {self.id} is still {self.state} after {timeout} s; do training steps go on?"
                )
        return self.path

    def report(self) -> str:
        """Return the output of ``torchperfd analyze`` for all ranks; runs it as a process of its own.

        Raises:
            CaptureError: Some rank has no trace, or one cannot be read.
        """
        return analysis_of(self.path)

    def cancel(self) -> None:
        """Give the capture up."""
        self._cancel()

    def on_result(self, result: "session_pb2.CaptureOrderResult") -> None:
        """Update the progress from a message of the daemon."""
        self._newest = result
        if result.ended:
            self._ended.set()


def _is_plain(name: str) -> bool:
    return bool(name) and name == Path(name).name


def _until(deadline: float) -> float:
    return max(0.0, min(_RESULT_POLL_S, deadline - time.monotonic()))


def _outcome(result: "session_pb2.CaptureOrderResult") -> str:
    if result.state == "partial":
        return f"is partial: {result.reason}"
    return f"failed: {result.reason}"


def chosen_ranks(ranks: Literal["all"] | Sequence[int]) -> list[int]:
    """Return the ranks that are asked for; none for all.

    Raises:
        ValueError: There are no such ranks.
    """
    if ranks == "all":
        return []
    if isinstance(ranks, str) or not ranks or not all(0 <= rank < 2**32 for rank in ranks):
        raise ValueError(f'ranks must be "all" or ranks of the job, not {ranks!r}')
    return sorted(set(ranks))


Download = Callable[[str, str, float], Iterator[bytes]]
"""Yields a file of a capture in pieces: its id, the file's name, and the most seconds that it may take."""

_FETCH_FILE_S: Final = 600.0


class CaptureFetcher:
    """Finds the files of captures, wherever the daemon keeps them.

    Args:
        directory: Where captures of this process go.
        download: Asks the daemon; raises OSError where it does not answer.
    """

    def __init__(self, directory: CapturesDirectory, download: Download) -> None:
        self._directory = directory
        self._download = download

    def fetch(self, capture_id: str, folder: str, names: Iterable[str]) -> Path:
        """Return a folder that this process can read with files of a capture; fetched if need be.

        Args:
            folder: Where the daemon keeps it; used as it is if this process can read it.

        Raises:
            CaptureError: The daemon does not send a file, or it cannot be written.
        """
        if folder and os.access(folder, os.R_OK | os.X_OK):
            return Path(folder)
        try:
            path = self._directory.folder(capture_id)
            with CaptureFolder.opened(path) as opened:
                for name in names:
                    self._fetch(opened, path, name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CaptureError(f"cannot fetch capture {capture_id} from the daemon: {reason}") from error
        return path

    def read(self, capture_id: str, name: str, most_bytes: int, timeout: float) -> bytes:
        """Return a small file of a capture; empty if the daemon does not send it whole in time."""
        content = b""
        with contextlib.suppress(OSError):
            for piece in self._download(capture_id, name, timeout):
                content += piece
                if len(content) > most_bytes:
                    return b""
            return content
        return b""

    def _fetch(self, folder: CaptureFolder, path: Path, name: str) -> None:
        if (path / name).is_file():
            return
        with folder.writing(name) as file:
            for piece in self._download(path.name, name, _FETCH_FILE_S):
                file.write(piece)


_ORDER_TIMEOUT_S: Final = 86_400.0


class JobCaptureOrders:
    """Orders captures of a job from the daemon, and passes its answers on to their handles.

    Args:
        outbox: Where orders go.
        connection: Returns a number that changes when the daemon goes away, 0 while there is none.
        fetch: Returns a folder that this process can read with files of a capture; see ``CaptureFetcher``.
    """

    def __init__(
        self,
        outbox: "Outbox[session_pb2.ClientMessage]",
        connection: Callable[[], int],
        fetch: Callable[[str, str, Iterable[str]], Path],
    ) -> None:
        self._outbox = outbox
        self._connection = connection
        self._fetch = fetch
        self._orders: dict[int, JobCapture] = {}
        self._ids = itertools.count(1)
        self.served = False
        """The daemon takes orders."""

    def order(self, rank: int, ranks: Sequence[int], options: "CaptureOptions") -> JobCapture:
        """Order a capture of some ranks, or of all of the job when none is named.

        Raises:
            CaptureError: This is not rank 0, or no daemon takes orders.
        """
        from torchperfd.v1 import session_pb2

        if rank != 0:
            raise CaptureError(
                f"this is rank {rank}, and only rank 0 captures other ranks; call it there,"
                " or leave ranks out to capture this one"
            )
        if not self._connection():
            raise CaptureError(
                "no daemon is connected, and only a daemon reaches other ranks;"
                " start one with `torchperfd serve`, or leave ranks out"
            )
        if not self.served:
            raise CaptureError("the daemon is too old to capture other ranks; install this version on it")
        order_id = next(self._ids)
        wanted = session_pb2.CaptureOrder(
            order_id=order_id,
            ranks=ranks,
            options=options.to_message(),
            # The script's wait() has its own timeout; a process that exits ends the order.
            timeout_seconds=contract.AUTOMATIC_CAPTURE_S if options.automatic else _ORDER_TIMEOUT_S,
        )

        def cancel() -> None:
            unwanted = session_pb2.CaptureOrder(order_id=order_id, cancel=True)
            self._outbox.put(session_pb2.ClientMessage(capture_order=unwanted))

        capture = JobCapture(self._connection, cancel, self._fetch)
        self._orders[order_id] = capture
        self._outbox.put(session_pb2.ClientMessage(capture_order=wanted))
        return capture

    def on_welcome(self, features: Iterable[str]) -> None:
        """Drop the orders to an earlier daemon: they will not be answered."""
        self.served = contract.CAPTURE_ORDER in features
        self._orders.clear()

    def on_result(self, result: "session_pb2.CaptureOrderResult") -> None:
        """Act on an answer of the daemon's."""
        capture = self._orders.get(result.order_id)
        if capture is not None:
            capture.on_result(result)
            if result.ended:
                self._orders.pop(result.order_id, None)
