"""The HTTP interface over real services in this process, for tests."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, cast

import httpx
from starlette.types import ASGIApp
from tests.support.served import Served, serving, short_directory, with_fixtures_of

from torchperfd_daemon.captures.analysis_child import ChildFiles
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.web.access import PageToken, Parts
from torchperfd_daemon.web.api import Api
from torchperfd_daemon.web.app import build_app
from torchperfd_daemon.web.captures_api import Reports, command_for
from torchperfd_daemon.web.endpoint import AnswerCache

P = ParamSpec("P")

TOKEN = "right-token"
OWNER = {"x-torchperfd-token": TOKEN}


@dataclass
class Page:
    """The interface, and the parts behind it."""

    served: Served
    api: Api
    app: ASGIApp
    parts: Parts
    reports: Reports

    async def ask(self, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        """Send a request, by default without the token."""
        transport = httpx.ASGITransport(cast(Any, self.app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    async def get(self, path: str, **headers: str) -> Any:
        """Return a document."""
        answer = await self.ask(
            f"/api/v1/{path}", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Act, with the token."""
        return await self.ask(f"/api/v1/{path}", "POST", json=body, headers={**OWNER, **headers})


@contextlib.asynccontextmanager
async def serving_page(
    report_command: Callable[[ChildFiles, str], list[str]] = command_for,
) -> AsyncIterator[Page]:
    """Serve the interface, on the running loop."""
    with short_directory() as directory:
        async with serving(directory) as served:
            parts = Parts(
                store=served.store,
                control=served.control,
                catalog=served.catalog,
                coordinator=served.coordinator,
                node="node-a",
                instance="i1",
            )
            reports = Reports(served.catalog, report_command)
            api = Api(parts, PageToken(TOKEN), served.verdicts.get, AnswerCache(0.0), reports)
            app = build_app(MetricsPage([]), lambda: True, routes=api.routes())
            try:
                yield Page(served, api, app, parts, reports)
            finally:
                api.hub.close("end")
                await api.close()


def with_page(test: Callable[Concatenate[Page, P], Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Give a test its first parameter; the others are fixtures."""

    async def run(*arguments: P.args, **fixtures: P.kwargs) -> None:
        async with serving_page() as page:
            await test(page, *arguments, **fixtures)

    return with_fixtures_of(test, 1, run)
