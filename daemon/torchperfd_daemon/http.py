"""The daemon's HTTP side: the metrics page and two health endpoints, and nothing else."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from torchperfd_daemon.metrics import MetricsPage


def build_app(page: MetricsPage, is_ready: Callable[[], bool]) -> Starlette:
    """Return the ASGI application.

    Args:
        page: What ``/metrics`` shows.
        is_ready: Whether clients are being served; false while starting and draining.
    """

    async def metrics(request: Request) -> Response:
        body, content_type = page.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def healthy(_request: Request) -> Response:
        return PlainTextResponse("torchperfd is healthy\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("torchperfd is ready\n")
        return PlainTextResponse("torchperfd is not ready\n", status_code=503)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
        ]
    )
