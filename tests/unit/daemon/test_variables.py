"""Environment variables, and lines of the daemon's log."""

import io
import json
import logging
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.commands import Run

from torchperfd import attachment
from torchperfd.v1.variables import PREFIX, VARIABLES, known_environment, unknown_text, unknown_variables
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.collectors.base import Sampler
from torchperfd_daemon.collectors.node import CpuCollector
from torchperfd_daemon.config.options import OPTIONS
from torchperfd_daemon.metrics.page import MetricsPage
from torchperfd_daemon.text import JournalFormatter, configure_logging, is_journal
from torchperfd_daemon.web.app import PageCache

REPOSITORY = Path(__file__).parents[3]
READ = re.compile(rf"(?<![A-Z_]){PREFIX}[A-Z0-9_]*[A-Z0-9]")


def test_options_of_serve_are_declared_variables() -> None:
    ours = {option.variable for option in OPTIONS if not option.flag_only}
    others = {"CONFIG", "JOB", "NO_ADVISE", "RUN", "RUNS_DIR", "SERVICE_USER", "STACK_SIGNAL"}
    tools = {"PROTO_VENV", "REQUIRE_NATIVE", "REWRITE_GOLDEN"}
    assert ours | {f"{PREFIX}{name}" for name in others | tools} == VARIABLES


@pytest.mark.parametrize("folder", ["client", "daemon", "cli", "tools", "benchmarks", "deploy", "docs"])
def test_variables_in_the_source_are_declared(folder: str) -> None:
    kinds = {".py", ".c", ".h", ".sh", ".md", ".yaml", ".service", ".sbatch", ".conf"}
    found: dict[str, str] = {}
    for path in (REPOSITORY / folder).rglob("*"):
        if path.suffix in kinds and path.name != "variables.py":
            for name in READ.findall(path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault(name, str(path))
    unknown = [*unknown_variables(found)]
    # Prefixes of a whole family, and the one that the docs misspell on purpose.
    wrong = [name for name in unknown if not any(each.startswith(f"{name}_") for each in VARIABLES)]
    assert {name: found[name] for name in wrong if name != "TORCHPERFD_SOKET"} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("INTERVALL", "TORCHPERFD_INTERVALL is unknown; did you mean TORCHPERFD_INTERVAL?"),
        ("SOKET", "TORCHPERFD_SOKET is unknown; did you mean TORCHPERFD_SOCKET?"),
        ("SOCKETT", "TORCHPERFD_SOCKETT is unknown; did you mean TORCHPERFD_SOCKET?"),
        (
            "CAPTURE_MAX_BYTES",
            "TORCHPERFD_CAPTURE_MAX_BYTES is unknown; did you mean TORCHPERFD_CAPTURES_MAX_BYTES?",
        ),
        ("socket", "TORCHPERFD_socket is unknown; did you mean TORCHPERFD_SOCKET?"),
        ("QQQQ", "TORCHPERFD_QQQQ is unknown"),
        ("", "TORCHPERFD_ is unknown"),
        *((name, "") for name in ("SOCKET", "TEST_ANYTHING", "REWRITE_GOLDEN", "RUN")),
        # Kubernetes sets these for Services named torchperfd and torchperfd-fleet.
        *((name, "") for name in ("PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_METRICS")),
        *((name, "") for name in ("PORT_9407_TCP", "PORT_9407_TCP_ADDR", "FLEET_SERVICE_HOST", "FLEET_PORT")),
    ],
)
def test_misspelt_variable_gets_the_nearest_name(name: str, text: str) -> None:
    environ = {f"{PREFIX}{name}": "1", "HOME": "/root", f"X{PREFIX}SOKET": "1"}
    assert unknown_text(environ) == text
    assert known_environment(environ) == {
        key: value for key, value in environ.items() if not text or not key.startswith(PREFIX)
    }


@pytest.mark.parametrize("arguments", [["ps"], ["doctor"], ["version"], ["config", "show"], ["serve"]])
def test_commands_refuse_a_misspelt_variable(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPERFD_INTERVALL", "3")
    assert run(*arguments) == (
        2,
        "",
        "torchperfd: TORCHPERFD_INTERVALL is unknown; did you mean TORCHPERFD_INTERVAL?\n",
    )


def test_training_logs_a_misspelt_variable_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHPERFD_SOKET", "/x")
    monkeypatch.setattr(attachment, "_variables_checked", False)
    with caplog.at_level(logging.WARNING, "torchperfd"):
        attachment.warn_of_variables()
        attachment.warn_of_variables()
    assert caplog.messages == ["TORCHPERFD_SOKET is unknown; did you mean TORCHPERFD_SOCKET?"]


def test_only_one_rank_of_a_node_warns_of_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHPERFD_SOKET", "/x")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(attachment, "_variables_checked", False)
    attachment.warn_of_variables()
    assert caplog.messages == []


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
        configure_logging("info", stream=stream)
        logging.getLogger("torchperfd.x").warning("disk full")
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_journal(stream)
    assert (tmp_path / "journal").read_text() == "<4>torchperfd.x: disk full\n"


def test_terminal_line_has_its_time_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    logging.getLogger("torchperfd.x").warning("disk full")
    assert stream.getvalue().endswith(" WARNING torchperfd.x: disk full\n")
    assert stream.getvalue()[:2] == "20"


def test_json_line_has_the_record_and_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    log = logging.getLogger("torchperfd.x")
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    log.warning('disk "%s"\nfull', "ä")
    try:
        raise ValueError("no space")
    except ValueError:
        log.exception("cannot write")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert before <= datetime.fromisoformat(first.pop("time")) <= datetime.now(UTC)
    assert first == {"level": "warning", "logger": "torchperfd.x", "message": 'disk "ä"\nfull'}
    assert (second["level"], second["message"]) == ("error", "cannot write")
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("no space")


def test_json_in_the_journal_keeps_the_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        configure_logging("info", "json", stream)
        logging.getLogger("torchperfd.x").error("one\ntwo")
    priority, line = (tmp_path / "journal").read_text()[:3], (tmp_path / "journal").read_text()[3:]
    assert priority == "<3>"
    assert json.loads(line)["message"] == "one\ntwo"


def test_debug_level_is_for_our_own_lines_only() -> None:
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
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
