"""Captures of a whole job that its rank 0 requests from within the script."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from torchperfd.v1 import session_pb2
from torchperfd_daemon.captures import Coordinator, Participant
from torchperfd_daemon.captures.attempt import MAX_STEPS
from torchperfd_daemon.captures.manifest import CaptureOptions
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.service import translate
from torchperfd_daemon.service.targets import PeerDirectory, RankSelection, whole_job

log = logging.getLogger("torchperfd.orders")

_AUTOMATIC: Final = "automatic"
_MAX_ORDERS: Final = 16
_LONGEST_S: Final = 86_400.0
_NOT_CONNECTED: Final = "is not connected to this daemon"


@dataclass(slots=True)
class _Order:
    """An order in progress; its capture has no id before it was admitted."""

    task: "asyncio.Task[None] | None" = None
    capture_id: str = ""
    unwanted: bool = False


class CommandHandler:
    """Runs ordered captures, and sends their progress to the rank that ordered them.

    Args:
        others: Finds those on other nodes; None where there are none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        of_run: Callable[[str], Sequence[Participant]],
        others: PeerDirectory | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._of_run = of_run
        self._others = others
        self._orders: dict[tuple[Participant, int], _Order] = {}

    def on_order(
        self,
        requester: Participant,
        run: str,
        order: session_pb2.CaptureOrder,
        send_result: Callable[[session_pb2.CaptureOrderResult], None],
    ) -> None:
        """Start or cancel an order.

        Args:
            requester: The rank that orders; must be rank 0.
            send_result: Takes each answer to it.
        """
        key = (requester, order.order_id)
        known = self._orders.get(key)
        if order.cancel and known is not None:
            known.unwanted = True
            if known.capture_id:
                self._coordinator.cancel(known.capture_id, "script")
        if order.cancel or known is not None:
            return
        self._orders[key] = begun = _Order()
        begun.task = asyncio.get_running_loop().create_task(self._serve(key, run, order, send_result))

    def on_departure(self, requester: Participant) -> None:
        """Cancel the orders of a rank that has left."""
        for key, order in list(self._orders.items()):
            if key[0] is requester and order.task is not None:
                order.task.cancel()

    async def _serve(
        self,
        key: tuple[Participant, int],
        run: str,
        order: session_pb2.CaptureOrder,
        send_result: Callable[[session_pb2.CaptureOrderResult], None],
    ) -> None:
        begun = self._orders[key]
        try:
            options, timeout = _checked(order)
            if key[0].rank != 0:
                raise UsageError("only rank 0 may order a capture of other ranks", "do it there")
            if len(self._orders) > _MAX_ORDERS:
                raise TorchperfdError(f"{_MAX_ORDERS} orders are in progress", "wait for one of them")
            async with self._gathered(run, order.ranks) as gathered:
                trigger = _AUTOMATIC if options.automatic else "script"
                async for progress in self._coordinator.capture(
                    run, gathered.participants, options, timeout, trigger=trigger
                ):
                    if not begun.capture_id:
                        begun.capture_id = progress.record.capture_id
                        if begun.unwanted:
                            self._coordinator.cancel(begun.capture_id, "script")
                    send_result(
                        translate.order_result_to_message(order.order_id, progress, gathered.elsewhere)
                    )
        except TorchperfdError as error:
            send_result(_refused(order, str(error)))
        except Exception:
            log.exception("a capture ordered by a script failed")
            send_result(_refused(order, "internal error; see the daemon's log"))
        finally:
            del self._orders[key]

    @asynccontextmanager
    async def _gathered(self, run: str, ranks: Sequence[int]) -> AsyncIterator[RankSelection]:
        if self._others is None:
            yield RankSelection(run, self._participants(run, ranks), {}, [])
            return
        users = {each.facts.uid for each in self._of_run(run)}
        async with self._others.gather(
            run, ranks, lambda: {run: [*self._of_run(run)]}, users.__contains__
        ) as gathered:
            yield gathered

    def _participants(self, run: str, ranks: Iterable[int]) -> list[Participant]:
        """Return the chosen ranks, by default those of the whole job, connected or not."""
        here = {each.rank: each for each in self._of_run(run)}
        if not here:
            raise NoSuchTargetError(
                f"no rank of run {run} is connected", "`torchperfd ps` lists those there are"
            )
        return whole_job(run, [*ranks], here, _NOT_CONNECTED, self._coordinator)


def _refused(order: session_pb2.CaptureOrder, reason: str) -> session_pb2.CaptureOrderResult:
    return session_pb2.CaptureOrderResult(order_id=order.order_id, state="failed", ended=True, reason=reason)


def _checked(order: session_pb2.CaptureOrder) -> tuple[CaptureOptions, float]:
    """Return what to record, and for how long to try.

    Raises:
        UsageError: A value is out of range.
    """
    options = translate.capture_options_from_message(order.options)
    if not 1 <= options.steps <= MAX_STEPS:
        raise UsageError(f"steps must be 1 to {MAX_STEPS}")
    timeout = order.timeout_seconds
    if not 0 < timeout <= _LONGEST_S:
        raise UsageError("the timeout must be up to a day")
    return options, timeout
