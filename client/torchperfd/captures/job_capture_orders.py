"""Orders for captures of a whole job: rank 0's script sends them to the node's daemon."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchperfd.captures.capture import CaptureOptions
from torchperfd.captures.job_capture import JobCapture
from torchperfd.captures.messages import options_message
from torchperfd.errors import CaptureError
from torchperfd.link.outbox import Outbox
from torchperfd.v1 import contract

if TYPE_CHECKING:
    from torchperfd.v1 import session_pb2

_TIMEOUT_S: Final = 86_400.0


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

    def order(self, rank: int, ranks: Sequence[int], options: CaptureOptions) -> JobCapture:
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
            options=options_message(options),
            # The script's wait() has its own timeout; a process that exits ends the order.
            timeout_seconds=contract.AUTOMATIC_CAPTURE_S if options.automatic else _TIMEOUT_S,
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
