"""Who may call the fleet's port: calls that carry the secret. Others are refused, counted and logged."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from torchperfd_daemon.fleet.credentials import Current

log = logging.getLogger("torchperfd.fleet")

_LOG_EVERY_S: Final = 10.0


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Admits calls that carry the fleet's secret, whatever they call.

    Args:
        current: Returns the credentials in force.
        clock: Monotonic seconds.
    """

    def __init__(self, current: Current, clock: Callable[[], float] = time.monotonic) -> None:
        self.current = current
        self._clock = clock
        self._log_after = -_LOG_EVERY_S
        self._unlogged = 0
        self.refused_calls = 0
        """Since the start."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Go on to the method, or to a refusal."""
        if self.current().admits(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        self.refused_calls += 1
        method = handler_call_details.method

        async def refuse(_requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            self._log_refusal(method, context.peer())
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the fleet's token is missing or another one; give all daemons the same --fleet-token-file",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, method: str, peer: str) -> None:
        self._unlogged += 1
        if self._clock() < self._log_after:
            return
        log.warning("refused %s from %s: no valid token (%d calls refused)", method, peer, self._unlogged)
        self._log_after = self._clock() + _LOG_EVERY_S
        self._unlogged = 0
