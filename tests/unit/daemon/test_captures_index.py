"""The index of captures: it says what the folders say, whatever becomes of it or of them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.daemon.kept import BASE, add, ids, settle

from torchperfd_daemon.captures import folder, index
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.index import FILE, FOLDER, Query
from torchperfd_daemon.captures.manifest import CaptureState
from torchperfd_daemon.errors import TorchperfdError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were read; the index is there so that they are few."""
    read = folder.read
    names: list[str] = []

    def noted(path: Path, now: float) -> folder.Found | None:
        names.append(path.name)
        return read(path, now)

    monkeypatch.setattr(folder, "read", noted)
    return names


def truth(directory: Path) -> list[str]:
    """Return what the folders alone say, newest first."""
    found = [folder.read(path, BASE) for path in directory.iterdir() if folder.is_id(path.name)]
    records = [each.record for each in found if each is not None and each.record is not None]
    records.sort(key=lambda record: (record.requested_at, record.capture_id), reverse=True)
    return [record.capture_id for record in records]


def test_a_settled_directory_is_listed_without_reading_folders(catalog: Catalog, reads: list[str]) -> None:
    for number in range(5):
        add(catalog, f"c{number}", requested_at=BASE + number)
    settle(catalog)
    assert ids(catalog) == ["c4", "c3", "c2", "c1", "c0"]
    assert sorted(reads) == ["c0", "c1", "c2", "c3", "c4"]
    settle(catalog)  # making the index changed the directory
    ids(catalog)
    del reads[:]
    assert ids(catalog) == ["c4", "c3", "c2", "c1", "c0"]
    assert reads == []


def test_only_what_came_is_read(catalog: Catalog, reads: list[str]) -> None:
    add(catalog, "old")
    settle(catalog)
    ids(catalog)
    del reads[:]
    add(catalog, "new", requested_at=BASE + 1)
    assert ids(catalog) == ["new", "old"]
    assert reads == ["new"]
    shutil.rmtree(catalog.directory / "old")
    assert ids(catalog) == ["new"]


def test_a_capture_in_progress_is_seen_to_end(catalog: Catalog) -> None:
    catalog.create("20231114-221320-abcdef")
    settle(catalog)
    assert [each.record.state for each in catalog.list().captures] == [CaptureState.PREPARING]
    record = catalog.get("20231114-221320-abcdef")
    record.state = CaptureState.FAILED
    catalog.save(record)
    assert [each.record.state for each in catalog.list().captures] == [CaptureState.FAILED]


def test_index_changed_old_capture_is_read_again(catalog: Catalog) -> None:
    add(catalog, "one")
    settle(catalog)
    assert not catalog.list().captures[0].pinned
    (catalog.directory / "one" / ".pinned").touch()
    assert catalog.list().captures[0].pinned


def test_queries_choose(catalog: Catalog) -> None:
    for number in range(6):
        add(
            catalog,
            f"c{number}",
            requested_at=BASE + number,
            run="bert" if number % 2 else "gpt",
            state=CaptureState.PARTIAL if number == 3 else CaptureState.COMPLETE,
        )

    def chosen(**query: object) -> tuple[list[str], int]:
        listing = catalog.list(Query(**query))  # type: ignore[arg-type]
        return [each.record.capture_id for each in listing.captures], listing.total

    assert chosen(limit=2) == (["c5", "c4"], 6)
    assert chosen(run="bert") == (["c5", "c3", "c1"], 3)
    assert chosen(run="bert", limit=1) == (["c5"], 3)
    assert chosen(run="ber") == ([], 0)
    assert chosen(state=CaptureState.PARTIAL) == (["c3"], 1)
    assert chosen(since=BASE + 2, before=BASE + 4) == (["c3", "c2"], 2)


def test_odd_names_of_runs_are_found_again(catalog: Catalog) -> None:
    for number, run in enumerate(("'; DROP TABLE captures; --", "a\0b", "é\U0001f600", "%")):
        add(catalog, f"c{number}", run=run)
        shown = run.replace("\0", "?")
        assert [each.record.run for each in catalog.list(Query(run=run)).captures] == [shown]


def made(directory: Path, count: int) -> Catalog:
    catalog = Catalog(directory)
    for number in range(count):
        add(catalog, f"c{number}", requested_at=BASE + number)
    settle(catalog)
    ids(catalog)
    return catalog


@settings(max_examples=60)
@given(part=st.floats(0, 1), garbage=st.binary(max_size=64))
def test_a_damaged_index_costs_no_capture(part: float, garbage: bytes) -> None:
    """Cut off somewhere, with something else at the end: what is listed is the truth."""
    with tempfile.TemporaryDirectory() as directory:
        catalog = made(Path(directory) / "captures", 40)
        path = catalog.directory / FOLDER / FILE
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))] + garbage)
        assert ids(catalog) == truth(catalog.directory)
        assert ids(catalog) == truth(catalog.directory), "it is mended"


@pytest.mark.parametrize("there", ["nothing", "empty", "garbage", "folder", "no folder", "file for folder"])
def test_whatever_lies_in_the_indexs_place(catalog: Catalog, reads: list[str], there: str) -> None:
    made(catalog.directory, 3)
    path = catalog.directory / FOLDER / FILE
    if there in ("no folder", "file for folder"):
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    match there:
        case "empty":
            path.touch()
        case "garbage":
            path.write_bytes(b"no database" * 1000)
        case "folder":
            path.mkdir()
        case "file for folder":
            path.parent.touch()
    assert ids(catalog) == ["c2", "c1", "c0"]
    settle(catalog)
    ids(catalog)
    del reads[:]
    assert ids(catalog) == ["c2", "c1", "c0"]
    is_in_the_way = there in ("folder", "file for folder")
    assert len(reads) == (3 if is_in_the_way else 0), "it is made again where it can be"


def test_index_of_another_version_is_made_again(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    made(catalog.directory, 3)
    monkeypatch.setattr(index, "_VERSION", b"torchperfd captures 2")
    assert ids(catalog) == ["c2", "c1", "c0"]


def test_index_after_an_update_removes_the_older_file(catalog: Catalog) -> None:
    add(catalog, "one")
    (catalog.directory / FOLDER).mkdir()
    (catalog.directory / FOLDER / "captures.sqlite").write_bytes(b"older")
    assert ids(catalog) == ["one"]
    assert [path.name for path in (catalog.directory / FOLDER).iterdir()] == [FILE]


def test_an_index_that_others_may_write_is_not_believed(catalog: Catalog, reads: list[str]) -> None:
    made(catalog.directory, 2)
    ids(catalog)
    del reads[:]
    (catalog.directory / FOLDER).chmod(0o777)
    assert ids(catalog) == ["c1", "c0"]
    assert sorted(reads) == ["c0", "c1"]


def test_a_link_in_the_indexs_place_is_not_followed(catalog: Catalog, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    catalog.directory.mkdir()
    (catalog.directory / FOLDER).symlink_to(elsewhere)
    add(catalog, "one")
    assert ids(catalog) == ["one"]
    assert list(elsewhere.iterdir()) == []


def test_reader_without_ownership_of_the_index_gets_a_copy(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    made(catalog.directory, 3)
    settle(catalog)
    ids(catalog)
    add(catalog, "c9", requested_at=BASE + 9)
    before = {path: path.read_bytes() for path in (catalog.directory / FOLDER).iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    del reads[:]
    assert ids(catalog) == ["c9", "c2", "c1", "c0"]
    assert reads == ["c9"], "the rest is the owner's index"
    assert {path: path.read_bytes() for path in (catalog.directory / FOLDER).iterdir()} == before


def test_captures_come_and_go_while_they_are_listed(catalog: Catalog) -> None:
    """Those that are there all the time are in every listing, whole; nothing half is ever in one."""
    for number in range(20):
        add(catalog, f"stays-{number:02}", {0: b"a", 1: b"b"}, requested_at=BASE + number)
    stop = threading.Event()

    def come_and_go(name: str) -> int:
        turn = 0
        while not stop.is_set():
            capture_id = f"{name}-{turn}"
            add(catalog, capture_id, {0: b"a", 1: b"b"})
            if turn % 3:
                catalog.pin(capture_id)
                catalog.pin(capture_id, pinned=False)
            catalog.remove(capture_id)
            turn += 1
        return turn

    with ThreadPoolExecutor() as pool:
        turns = [pool.submit(come_and_go, name) for name in ("x", "y")]
        try:
            for _ in range(60):
                listed = catalog.list().captures
                stays = [each.record for each in listed if each.record.capture_id.startswith("stays")]
                assert [record.capture_id for record in stays] == [f"stays-{n:02}" for n in range(19, -1, -1)]
                assert all(len(each.record.ranks) == 2 for each in listed)
        finally:
            stop.set()
    assert all(turn.result() for turn in turns)
    assert ids(catalog) == truth(catalog.directory)


def test_several_processes_may_make_the_index_at_once(catalog: Catalog) -> None:
    for number in range(30):
        add(catalog, f"c{number:02}")
    code = (
        "import sys; from pathlib import Path; from torchperfd_daemon.captures.catalog import Catalog\n"
        "print(Catalog(Path(sys.argv[1])).list().total)"
    )
    listings = [
        subprocess.Popen([sys.executable, "-c", code, str(catalog.directory)], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [listing.communicate(timeout=60)[0] for listing in listings] == [b"30\n"] * 4


def test_a_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TorchperfdError, match=r"cannot read .*file: Not a directory; .*--captures-dir"):
        Catalog(tmp_path / "file").list()


FULL_DISK = """
import json, os, sys
from pathlib import Path
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.errors import DiskFullError, TorchperfdError
base = Path(sys.argv[1])
said = {}
def saved(catalog, capture_id, when, ranks=()):
    catalog.create(capture_id)
    catalog.save(CaptureRecord(capture_id, "bert", "command", when, CaptureState.COMPLETE, ranks=list(ranks)))
catalog = Catalog(base / "captures")
saved(catalog, "a", 1.0)
(base / "captures/a/rank0.json").write_bytes(b"x" * 600_000)
saved(catalog, "b", 2.0)
catalog.list()
try:
    Catalog(base / "captures", Quota(free_bytes=2**20)).create("c")
except DiskFullError as error:
    said["reserve"] = str(error)
catalog.create("c")
try:
    with open(base / "filler", "wb", buffering=0) as filler:
        while filler.write(b"x" * 4096): pass
except OSError:
    pass
said["free"] = os.statvfs(base).f_bavail
try:
    catalog.save(CaptureRecord("c", "bert", "command", 3.0, ranks=[RankTrace(n) for n in range(500)]))
except TorchperfdError as error:
    said["save"] = str(error)
said["left"] = sorted(os.listdir(base / "captures/c"))
said["listed"] = [each.record.capture_id for each in catalog.list().captures]
RetentionWorker(Catalog(base / "captures", Quota(bytes=100_000))).enforce()
said["kept"] = [each.record.capture_id for each in catalog.list().captures]
saved(catalog, "d", 4.0)
said["after"] = [each.record.capture_id for each in catalog.list().captures]
os.sync()
os.system(f"mount -o remount,ro {base}")
said["read-only"] = [each.record.capture_id for each in Catalog(base / "captures").list().captures]
print(json.dumps(said))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], dict[str, object]]]:
    """Run a script beside a disk of 1 MiB that is gone with it."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounting a small disk takes root")
    mount = tmp_path / "disk"
    mount.mkdir()

    def run(script: str) -> dict[str, object]:
        shell = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", shell, "sh", str(mount), sys.executable, script],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode in (1, 77) and ("unshare" in done.stderr or "mount" in done.stderr):
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    yield run
    assert list(mount.iterdir()) == [], "it was mounted for the script alone"


def test_a_full_disk_loses_nothing_and_is_said(small_disk: Callable[[str], dict[str, object]]) -> None:
    said = small_disk(FULL_DISK)
    assert str(said["reserve"]).startswith("only 0 MiB are free on the disk of ")
    assert "and 1 MiB must stay free; make room with `torchperfd captures rm" in str(said["reserve"])
    assert said["free"] == 0
    assert "cannot write the manifest in " in str(said["save"])
    assert "No space left on device" in str(said["save"])
    assert said["left"] == [], "no part is left"
    assert said["listed"] == ["b", "a"]
    assert said["kept"] == ["b"]
    assert said["after"] == ["d", "b"]
    assert said["read-only"] == ["d", "b"]
