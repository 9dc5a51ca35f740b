"""Authentication on the fleet's port: calls without the secret are refused, counted and logged."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from torchperfd_daemon.fleet.credentials import Current
from torchperfd_daemon.log_limiter import LogLimiter

log = logging.getLogger("torchperfd.fleet")


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Admits calls that carry the fleet's secret, for all methods."""

    def __init__(self, current: Current) -> None:
        self.current = current
        self._limiter = LogLimiter(log)
        self.refused_calls = 0
        """Since the start."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the method's handler, or one that refuses the call."""
        if self.current().admits(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        self.refused_calls += 1
        method = handler_call_details.method

        async def refuse(_requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            self._limiter.warning("refused %s from %s: no valid token", method, context.peer())
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the fleet's token is missing or another one; give all daemons the same --fleet-token-file",
            )

        return grpc.stream_stream_rpc_method_handler(refuse)
