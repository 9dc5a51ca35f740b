"""The daemon's log: readable on a terminal, with priorities in systemd's journal."""

import io
import logging
import os
from pathlib import Path

import pytest

from torchperfd_daemon.captures import Catalog, RetentionWorker
from torchperfd_daemon.collectors.base import Sampler
from torchperfd_daemon.collectors.node import CpuCollector
from torchperfd_daemon.logs import JournalFormatter, configure_logging, is_journal
from torchperfd_daemon.metrics import MetricsPage
from torchperfd_daemon.web.app import PageCache


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.CRITICAL, 3),
        (logging.ERROR, 3),
        (logging.WARNING, 4),
        (logging.INFO, 6),
        (logging.DEBUG, 7),
    ],
)
def test_journal_line_begins_with_its_syslog_priority(level: int, priority: int) -> None:
    record = logging.LogRecord("torchperfd.x", level, __file__, 1, "disk %s", ("full",), None)
    assert JournalFormatter().format(record) == f"<{priority}>torchperfd.x: disk full"


def test_journal_repeats_the_priority_on_each_line() -> None:
    record = logging.LogRecord("torchperfd.x", logging.WARNING, __file__, 1, "one\ntwo", (), None)
    assert JournalFormatter().format(record) == "<4>torchperfd.x: one\n<4>two"


def test_journal_is_recognised_by_device_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(stream)
        configure_logging("info", stream)
        logging.getLogger("torchperfd.x").warning("disk full")
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_journal(stream)
    assert (tmp_path / "journal").read_text() == "<4>torchperfd.x: disk full\n"


def test_terminal_line_has_its_time_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stream = io.StringIO()
    configure_logging("info", stream)
    logging.getLogger("torchperfd.x").warning("disk full")
    assert stream.getvalue().endswith(" WARNING torchperfd.x: disk full\n")
    assert stream.getvalue()[:2] == "20"


def test_debug_level_is_for_our_own_lines_only() -> None:
    stream = io.StringIO()
    configure_logging("debug", stream)
    logging.getLogger("torchperfd.x").debug("ours")
    logging.getLogger("grpc._cython.cygrpc").debug("theirs")
    logging.getLogger("asyncio").debug("theirs")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()


def test_debug_level_shows_collectors_pages_and_captures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "torchperfd")
    Sampler(CpuCollector(), 1).sample_once()
    PageCache(MetricsPage([])).get(openmetrics=False, zipped=False)
    RetentionWorker(Catalog(tmp_path)).enforce()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        "collector cpu",
        "rendered /metrics",
        "captures directory",
    ]
