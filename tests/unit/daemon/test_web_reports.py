"""Pages of captures: made once, by one process at a time, and given up with the daemon."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.page_documents import CAPTURES, two_captures
from tests.support.values import some
from tests.unit.daemon.http_api import OWNER, serving_page
from tests.unit.daemon.kept import add

from torchperfd_daemon.captures.analysis_child import ChildFiles
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureState
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError, UsageError
from torchperfd_daemon.web import captures_api
from torchperfd_daemon.web.captures_api import MAX_KEPT, Reports, command_for

CAPTURE = "20260101-000000-abcdef"
LATER = "20260101-000100-abcdef"
WRITE = "import sys; open(sys.argv[1], 'w').write('<!doctype html>' + sys.argv[2])"


def writing(files: ChildFiles, page: str) -> list[str]:
    return [sys.executable, "-S", "-c", WRITE, page, " ".join(files.folders)]


def failing(files: ChildFiles, page: str) -> list[str]:
    return [sys.executable, "-S", "-c", "import sys; sys.exit('torchperfd: no trace at all')"]


def hanging(files: ChildFiles, page: str) -> list[str]:
    return [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]


@contextlib.asynccontextmanager
async def reports(
    catalog: Catalog, command: Callable[[ChildFiles, str], list[str]]
) -> AsyncIterator[Reports]:
    made = Reports(catalog, command)
    try:
        yield made
    finally:
        await made.close()


def test_command_analyses_at_idle_priority() -> None:
    command = command_for(ChildFiles(Path("/w"), ("x",), {"x/rank0.json": 7}, None), "page.html")
    assert command[2].endswith("low_priority.py")
    assert command[3:] == ["--link=7:x/rank0.json", "analyze", "--html", "page.html", "--workers", "1", "x"]
    two = command_for(ChildFiles(Path("/w"), ("x", "y"), {}, None), "page.html")
    assert two == [*command[:3], "compare", "--html", "page.html", "--workers", "1", "x", "y"]


async def test_page_that_is_no_file_is_not_taken(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    made = ("os.symlink('/etc/hostname', sys.argv[1])", "os.mkfifo(sys.argv[1])", "os.mkdir(sys.argv[1])")
    for script in made:

        def planting(files: ChildFiles, page: str, script: str = script) -> list[str]:
            return [sys.executable, "-S", "-c", f"import os, sys; {script}", page]

        async with reports(catalog, planting) as pages:
            report = pages.request(CAPTURE)
            await report.task
            assert (report.state, report.reason) == ("failed", "the analyser wrote no page")


async def test_page_is_made_once_in_a_private_directory(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    async with reports(catalog, writing) as made:
        report = made.request(CAPTURE)
        assert report.state == "making"
        assert made.request(CAPTURE) is report
        await report.task
        assert report.state == "ready"
        assert made.request(CAPTURE) is report
        assert report.page.read_text() == f"<!doctype html>{CAPTURE}"
        assert report.page.parent.stat().st_mode & 0o777 == 0o700
    assert not report.page.parent.exists()


async def test_a_failure_has_its_reason_and_can_be_tried_again(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    async with reports(catalog, failing) as made:
        report = made.request(CAPTURE)
        await report.task
        assert (report.state, report.reason) == ("failed", "no trace at all")
        assert made.request(CAPTURE) is not report


async def test_an_analysis_that_takes_too_long_is_ended(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures_api, "TIMEOUT_S", 0.05)
    add(catalog, CAPTURE)
    async with reports(catalog, hanging) as made:
        report = made.request(CAPTURE)
        await report.task
        assert "took more than" in report.reason


async def test_analyses_in_progress_end_with_the_daemon(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    async with reports(catalog, hanging) as made:
        made.request(CAPTURE)
        await asyncio.sleep(0)
        await made.close()
        assert made.find(CAPTURE).task.cancelled()  # type: ignore[union-attr]


async def test_only_captures_with_readable_traces_have_pages(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    add(catalog, "20260101-000001-abcdef", state=CaptureState.ARMED)
    add(catalog, "20260101-000002-abcdef", {})
    trace = catalog.folder(CAPTURE) / "rank0.json"
    async with reports(catalog, writing) as made:
        for capture_id in ("20260101-000001-abcdef", "20260101-000002-abcdef"):
            with pytest.raises(TorchperfdError):
                made.request(capture_id)
        with pytest.raises(NoSuchTargetError):
            made.request("20260101-000003-abcdef")
        trace.unlink()
        trace.symlink_to("/etc/hostname")
        with pytest.raises(NoSuchTargetError):
            made.request(CAPTURE)


async def test_old_pages_make_room_for_new_ones(catalog: Catalog) -> None:
    names = [f"20260101-0000{number:02}-abcdef" for number in range(MAX_KEPT + 2)]
    async with reports(catalog, writing) as made:
        for name in names:
            add(catalog, name)
            await made.request(name).task
        assert made.find(names[0]) is None
        assert len(list(some(made.find(names[-1])).page.parent.iterdir())) == MAX_KEPT


async def test_comparison_is_kept_beside_the_pages_of_its_captures(catalog: Catalog) -> None:
    for capture_id in (CAPTURE, LATER):
        add(catalog, capture_id)
    async with reports(catalog, writing) as made:
        both = made.request(CAPTURE, LATER)
        assert made.request(CAPTURE, LATER) is both
        pages = [both, made.request(LATER, CAPTURE), made.request(CAPTURE)]
        for page in pages:
            await page.task
        texts = [page.page.read_text().removeprefix("<!doctype html>") for page in pages]
        assert texts == [f"{CAPTURE} {LATER}", f"{LATER} {CAPTURE}", CAPTURE]


async def test_comparison_is_made_by_the_command(tmp_path: Path) -> None:
    """A page of a real comparison, by a process at idle priority with bounded memory."""
    catalog = two_captures(tmp_path / "captures", ranks=2)
    async with reports(catalog, command_for) as made:
        report = made.request(*CAPTURES)
        await report.task
        assert report.reason == ""
        text = report.page.read_text()
        assert "B's steps take 3.9 ms, A's 2.9 ms (+34 %)" in text
        assert "<img" not in text


async def test_comparison_needs_two_captures_with_traces(catalog: Catalog) -> None:
    add(catalog, CAPTURE)
    add(catalog, LATER, state=CaptureState.ARMED)
    async with reports(catalog, writing) as made:
        with pytest.raises(UsageError, match="compared with itself"):
            made.request(CAPTURE, CAPTURE)
        with pytest.raises(TorchperfdError, match="in progress"):
            made.request(CAPTURE, LATER)
        with pytest.raises(NoSuchTargetError):
            made.request(CAPTURE, "20260101-000003-abcdef")
        assert made.find(CAPTURE, LATER) is None


async def test_comparison_opens_through_a_link_without_the_token() -> None:
    async with serving_page(writing) as page:
        for capture_id in (CAPTURE, LATER):
            add(page.served.catalog, capture_id)
        path = f"captures/{CAPTURE}/comparison/{LATER}"
        assert (await page.post(path)).json() == {"state": "making"}
        assert (await page.ask(f"/api/v1/{path}")).status_code == 401
        assert (await page.ask(f"/api/v1/{path}", headers=OWNER)).status_code == 409
        await page.reports.request(CAPTURE, LATER).task
        ready = (await page.post(path)).json()
        opened = await page.ask(ready["url"])
        assert (opened.status_code, opened.text) == (200, f"<!doctype html>{CAPTURE} {LATER}")
        assert opened.headers["content-security-policy"].startswith("sandbox allow-scripts")
        assert (await page.ask(f"/api/v1/{path}", headers=OWNER)).text == opened.text
        assert (await page.post(f"captures/{CAPTURE}/comparison/{CAPTURE}")).status_code == 400


async def test_page_opens_through_a_link_without_the_token() -> None:
    async with serving_page(writing) as page:
        add(page.served.catalog, CAPTURE)
        assert (await page.post(f"captures/{CAPTURE}/report")).json() == {"state": "making"}
        early = await page.ask(f"/api/v1/captures/{CAPTURE}/report", headers=OWNER)
        assert early.status_code == 409
        await page.reports.request(CAPTURE).task
        ready = (await page.post(f"captures/{CAPTURE}/report")).json()
        assert ready["state"] == "ready"
        opened = await page.ask(ready["url"])
        assert (opened.status_code, opened.text) == (200, f"<!doctype html>{CAPTURE}")
        policy = opened.headers["content-security-policy"]
        # Of no origin, so that nothing in a trace could reach the interface, even as a script.
        assert policy.startswith("sandbox allow-scripts")
        assert "allow-same-origin" not in policy
        assert "connect-src" not in policy
        assert "default-src 'none'" in policy
