"""The handle of a capture of several ranks: what rank 0's script holds of one it has ordered."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from torchperfd.captures.handle import analysis_of
from torchperfd.errors import CaptureError, CaptureTimeoutError
from torchperfd.safety.flag import Flag

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2

_POLL_S: Final = 0.2
_GONE: Final = (
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
                raise CaptureError(_GONE)
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
        while not self._ended.wait(_POLL_S if deadline is None else _until(deadline)):
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
    return max(0.0, min(_POLL_S, deadline - time.monotonic()))


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
