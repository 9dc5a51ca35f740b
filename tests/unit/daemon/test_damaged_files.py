"""One damaged file harms only itself: manifests, receipts, ledgers and databases of any bytes whatever."""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.kept import BASE, add, ids

from torchperfd_cli.main import cli
from torchperfd_daemon.captures import folder, manifest
from torchperfd_daemon.captures.analyst import Analyst
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import FILE, FOLDER
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.goodput.store import GoodputStore, packed
from torchperfd_daemon.goodput.totals import GoodputTotals
from torchperfd_daemon.untrusted_files import DamagedError, decode, decode_clean

DEEP = b"[" * 100_000
BAD_BYTES = {
    "empty": b"",
    "not utf-8": b'{"run": "\xff\xfe"}',
    "deep": DEEP,
    "deep object": b'{"options":' * 50_000,
    "huge number": b'{"requested_at": 1e999}',
    "long number": b'{"requested_at": ' + b"9" * 5000 + b"}",
    "wrong types": b'{"capture_id": [], "run": 3, "ranks": "all"}',
    "surrogate": b'"\\ud800"',
    "binary": bytes(range(256)) * 64,
    "too long": b" " * (2 * 1024 * 1024),
}
VALID = manifest.CaptureRecord("c", "bert", "command", BASE, manifest.CaptureState.COMPLETE).encode()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": make_fifo,
    "directory": Path.mkdir,
    "link to itself": make_loop,
    "link to a device": make_device_link,
}


def mutated(document: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and a valid document with a few of its bytes replaced or cut off."""
    cut = st.integers(0, len(document)).map(lambda end: document[:end])
    edits = st.lists(st.tuples(st.integers(0, len(document) - 1), st.binary(max_size=4)), max_size=6)

    def apply(changes: list[tuple[int, bytes]]) -> bytes:
        changed = document
        for at, new in changes:
            changed = changed[:at] + new + changed[at + 1 :]
        return changed

    return st.binary(max_size=200) | cut | edits.map(apply)


@given(mutated(VALID))
@settings(deadline=None)
def test_manifest_any_bytes_decode_or_are_damaged(document: bytes) -> None:
    for kind in (manifest.CaptureRecord, manifest.RankManifest, manifest.Receipt):
        with contextlib.suppress(DamagedError):
            decode_clean(document, kind)


@given(mutated(packed(GoodputTotals.begin("p", 1))))
@settings(deadline=None)
def test_goodput_any_bytes_decode_or_are_damaged(document: bytes) -> None:
    try:
        found = decode(document, GoodputTotals)
    except DamagedError:
        return
    assert found.starts < 2**31


@given(mutated(VALID), st.sampled_from([manifest.FILE_NAME, "rank0.manifest.json", manifest.RECEIPT_FILE]))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_folder_any_bytes_reads_without_error(tmp_path: Path, document: bytes, name: str) -> None:
    path = tmp_path / "20260101-000000-abcdef"
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(document)
    assert folder.read(path, BASE) is not None
    (path / name).unlink()


@pytest.mark.parametrize(
    "name", [manifest.FILE_NAME, "rank0.manifest.json", manifest.RECEIPT_FILE, ".pinned"]
)
@pytest.mark.parametrize("damage", [*BAD_BYTES, *ODD_FILES])
def test_catalog_damaged_file_harms_only_its_capture(tmp_path: Path, name: str, damage: str) -> None:
    catalog = Catalog(tmp_path / "captures", Quota(count=1))
    add(catalog, "good")
    path = catalog.create("20260101-000000-abcdef") / name
    if damage in BAD_BYTES:
        path.write_bytes(BAD_BYTES[damage])
    else:
        ODD_FILES[damage](path)
    assert "good" in ids(catalog)
    retention = RetentionWorker(catalog)
    retention.enforce()
    assert ids(catalog) in (["good"], ["20260101-000000-abcdef"])
    for arguments in (["list"], ["list", "--json"], ["rm", "good"], ["show", "20260101-000000-abcdef"]):
        done = CliRunner().invoke(cli, ["captures", "--captures-dir", str(catalog.directory), *arguments])
        # What a command cannot do is an error with a message, which the program prints on one line.
        assert done.exception is None or isinstance(done.exception, (SystemExit, TorchperfdError))


@pytest.mark.parametrize("damage", [*BAD_BYTES, *ODD_FILES])
def test_index_damaged_file_costs_no_listing(tmp_path: Path, damage: str) -> None:
    catalog = Catalog(tmp_path / "captures")
    add(catalog, "good")
    ids(catalog)
    path = catalog.directory / FOLDER / FILE
    path.unlink()
    if damage in BAD_BYTES:
        path.write_bytes(BAD_BYTES[damage])
    else:
        ODD_FILES[damage](path)
    assert ids(catalog) == ["good"]


@pytest.mark.parametrize("damage", [*BAD_BYTES, *ODD_FILES])
def test_goodput_damaged_file_is_set_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / ".goodput" / "node.sqlite"
    path.parent.mkdir(mode=0o700)
    if damage in BAD_BYTES:
        path.write_bytes(BAD_BYTES[damage])
    else:
        ODD_FILES[damage](path)
    saved = GoodputStore(path.parent)
    saved.save({("bert", 0): packed(GoodputTotals.begin("p", 1))}, BASE_NS)
    assert list(saved.load("bert")) == [("bert", 0)]
    saved.close()


BASE_NS = int(BASE * 1e9)


@pytest.mark.parametrize(
    "row",
    [
        ("bert", "one", BASE_NS, "{}"),
        ("bert", -1, BASE_NS, "{}"),
        ("bert", 2**40, BASE_NS, packed(GoodputTotals.begin("p", 1)).decode()),
        ("bert", 1, BASE_NS, b"\xff\xfe"),
        ("bert", 1, BASE_NS, DEEP.decode()),
        (b"bert", 1, BASE_NS, "{}"),
    ],
)
def test_goodput_damaged_row_costs_only_itself(tmp_path: Path, row: tuple[object, ...]) -> None:
    saved = GoodputStore(tmp_path / ".goodput")
    saved.save({("bert", 0): packed(GoodputTotals.begin("p", 1))}, BASE_NS)
    saved.close()
    database = sqlite3.connect(tmp_path / ".goodput" / "node.sqlite")
    with database:
        database.execute("INSERT INTO ledgers VALUES (?, ?, ?, ?)", row)
    database.close()
    assert list(saved.load("bert")) == [("bert", 0)]
    assert list(saved.newest(100)) == [("bert", 0)]
    saved.close()


@pytest.mark.parametrize("offset", ["soon", 2**63 - 1, -(2**63), 1.5, b"\xff"])
@pytest.mark.parametrize("column", ["clock", "totals"])
def test_goodput_damaged_time_is_set_aside(tmp_path: Path, offset: object, column: str) -> None:
    saved = GoodputStore(tmp_path / ".goodput")
    assert saved.clock_offset("boot", 5, BASE_NS) == BASE_NS - 5
    saved.save({("bert", 0): packed(GoodputTotals.begin("p", 1))}, BASE_NS)
    saved.close()
    database = sqlite3.connect(tmp_path / ".goodput" / "node.sqlite")
    with database:
        if column == "clock":
            database.execute("UPDATE clock SET offset_ns = ?", (offset,))
        else:
            database.execute("UPDATE ledgers SET until_ns = ?", (offset,))
            database.execute("DELETE FROM clock")
    database.close()
    if offset != -(2**63) or column == "clock":
        assert saved.clock_offset("boot", 5, BASE_NS) == BASE_NS - 5
    saved.save({("bert", 0): packed(GoodputTotals.begin("p", 1))}, BASE_NS)
    assert list(saved.load("bert")) == [("bert", 0)]
    saved.close()


@pytest.mark.parametrize("error", [ValueError("any"), RecursionError(), TorchperfdError("full")])
def test_retention_any_error_goes_on_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    retention = RetentionWorker(Catalog(tmp_path / "captures"))
    monkeypatch.setattr("torchperfd_daemon.captures.retention_worker._INTERVAL_S", 0.001)
    again = threading.Event()
    passes = 0

    def enforce() -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise error
        again.set()

    monkeypatch.setattr(retention, "enforce", enforce)
    retention.start()
    assert again.wait(30)
    retention.stop()
    assert retention.health.failures == 1
    assert retention.health.last_success_unix_seconds > 0


def test_analyst_any_error_goes_on_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path / "captures")
    analyst = Analyst(catalog)
    done = threading.Event()
    seen: list[str] = []

    def analyse(record: manifest.CaptureRecord) -> None:
        seen.append(record.capture_id)
        if len(seen) == 1:
            raise ValueError("a damaged trace")
        done.set()

    monkeypatch.setattr(analyst, "analyse", analyse)
    for name in ("one", "two"):
        analyst.submit(add(catalog, name))
    analyst.start()
    assert done.wait(30)
    analyst.stop()
    assert (seen, analyst.health.failures) == (["one", "two"], 1)


def test_show_damaged_analysis_prints_one_line(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "captures")
    add(catalog, "good")
    for content in (*BAD_BYTES.values(), b'{"text": "\\ud800"}', json.dumps({"text": 3}).encode()):
        (catalog.directory / "good" / folder.ANALYSIS).write_bytes(content)
        done = CliRunner().invoke(cli, ["captures", "--captures-dir", str(catalog.directory), "show", "good"])
        assert done.exception is None or isinstance(done.exception, TorchperfdError)
