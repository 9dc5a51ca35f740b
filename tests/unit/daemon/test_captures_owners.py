"""Captures of several users: what one of them puts into the directory costs no other anything."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.kept import BASE, add, ids, settle

from torchperfd_daemon.captures import folder, manifest
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.coordinator import Coordinator
from torchperfd_daemon.captures.destination import Destination
from torchperfd_daemon.captures.manifest import RankFacts, Upload
from torchperfd_daemon.captures.rank_attempts import Result
from torchperfd_daemon.captures.retention import Kept, Quota, plan
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.captures.uploader import Uploader
from torchperfd_daemon.errors import TorchperfdError

SERVICE, ALICE, MALLORY = 61_184, 61_185, 61_186
PLANTED = "20200102-000000-abcdef"
MIB = 2**20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def give(path: Path, uid: int) -> None:
    """Make a file or folder another user's, with what is in it."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid, follow_symlinks=False)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """The directory of a service, open to all users."""
    catalog = Catalog(tmp_path / "captures", Quota(bytes=6 * MIB), lambda: BASE + 100)
    catalog.directory.mkdir()
    catalog.directory.chmod(0o1777)
    os.chown(catalog.directory, SERVICE, SERVICE)
    return catalog


def capture_of(catalog: Catalog, capture_id: str, uid: int, size: int = MIB, at: float = 0) -> Path:
    """Make a capture through the daemon, of a rank of a user's."""
    add(catalog, capture_id, {0: b"x" * size}, requested_at=BASE + at)
    path = catalog.directory / capture_id
    os.chown(path, SERVICE, SERVICE)
    os.chown(path / "manifest.json", SERVICE, SERVICE)
    os.chown(path / "rank0.json", uid, uid)
    return path


def plant(catalog: Catalog, name: str = PLANTED, size: int = 20 * MIB) -> Path:
    path = catalog.directory / name
    path.mkdir()
    (path / "x").write_bytes(os.urandom(MIB) * (size // MIB))
    (path / ".pinned").touch()
    give(path, MALLORY)
    return path


@needs_root
@pytest.mark.parametrize("manifested", [False, True])
def test_planted_folder_removes_no_capture(catalog: Catalog, manifested: bool) -> None:
    for number in range(5):
        capture_of(catalog, f"c{number}", ALICE, at=number)
    path = plant(catalog)
    if manifested:
        record = manifest.CaptureRecord(PLANTED, "r", "command", BASE, manifest.CaptureState.COMPLETE)
        (path / "manifest.json").write_bytes(record.encode())
        give(path, MALLORY)
    settle(catalog)
    retention = RetentionWorker(catalog)
    retention.enforce()
    assert set(ids(catalog)) >= {f"c{number}" for number in range(5)}
    assert retention.counts.captures == 5
    assert retention.counts.bytes < 6 * MIB
    assert (path / "x").exists(), "nor is it the daemon's to remove"


@needs_root
def test_planted_file_in_a_capture_removes_none(catalog: Catalog) -> None:
    for number in range(5):
        path = capture_of(catalog, f"c{number}", ALICE, at=number)
        (path / "noise").write_bytes(os.urandom(4 * MIB))
        (path / ".pinned").touch()
        for name in ("noise", ".pinned"):
            os.chown(path / name, MALLORY, MALLORY)
    retention = RetentionWorker(catalog)
    retention.enforce()
    assert len(ids(catalog)) == 5
    assert not any(listed.pinned for listed in catalog.list().captures), "a stranger's pin is none"
    catalog.pin("c0")
    assert [listed.pinned for listed in catalog.list().captures].count(True) == 1, "it takes its place"


@needs_root
def test_captures_of_one_user_evict_only_that_users(catalog: Catalog) -> None:
    for number in range(3):
        capture_of(catalog, f"alice{number}", ALICE, size=MIB // 2, at=number)
    for number in range(6):
        path = capture_of(catalog, f"mallory{number}", MALLORY, size=3 * MIB, at=10 + number)
        if number == 5:
            (path / ".pinned").touch()
            os.chown(path / ".pinned", MALLORY, MALLORY)
    RetentionWorker(catalog).enforce()
    assert [each for each in ids(catalog) if "alice" in each] == ["alice2", "alice1", "alice0"]
    assert [each for each in ids(catalog) if "mallory" in each] == ["mallory5"]


KEPT = st.lists(
    st.builds(
        Kept,
        capture_id=st.uuids().map(str),
        requested_at=st.integers(0, 100).map(float),
        bytes=st.integers(0, 100),
        protected=st.booleans(),
        owner=st.integers(0, 3),
    ),
    max_size=30,
    unique_by=lambda each: each.capture_id,
)


@given(KEPT, st.integers(1, 500), st.integers(1, 10))
def test_plan_leaves_every_owner_an_equal_share(kept: list[Kept], size: int, count: int) -> None:
    gone = {removal.capture_id for removal in plan(kept, Quota(bytes=size, count=count), 0.0)}
    owners = {each.owner for each in kept}
    for owner in owners:
        own = [each for each in kept if each.owner == owner]
        if sum(each.bytes for each in own) <= size // len(owners) and len(own) <= count // len(owners):
            assert not gone & {each.capture_id for each in own}
    left = [each for each in kept if each.capture_id not in gone]
    if not any(each.protected for each in kept):
        assert sum(each.bytes for each in left) <= size
        assert len(left) <= count


@needs_root
def test_planted_manifest_is_not_the_captures(catalog: Catalog) -> None:
    path = capture_of(catalog, "c0", ALICE)
    forged = manifest.CaptureRecord("c0", "pretrain-70b", "command", BASE, manifest.CaptureState.COMPLETE)
    (path / "manifest.json").write_bytes(forged.encode())
    os.chown(path / "manifest.json", MALLORY, MALLORY)
    found = some(folder.read(path, BASE))
    assert found.record is None or found.record.run != "pretrain-70b"


@needs_root
def test_planted_capture_is_not_uploaded(catalog: Catalog, tmp_path: Path) -> None:
    path = plant(catalog, size=3 * MIB)
    forged = manifest.CaptureRecord(
        PLANTED,
        "pretrain-70b",
        "command",
        BASE,
        manifest.CaptureState.COMPLETE,
        ranks=[manifest.RankTrace(0, manifest.CaptureState.COMPLETE, "", "x", 3 * MIB)],
    )
    (path / "manifest.json").write_bytes(forged.encode())
    give(path, MALLORY)
    by_ranks = catalog.directory / "20200102-000000-abcde0"
    by_ranks.mkdir()
    (by_ranks / "rank0.manifest.json").write_text(
        '{"rank": 0, "state": "complete", "reason": "", "file": "x", "bytes": 1, "sha256": "",'
        ' "step_range": [1, 2], "options": {}}'
    )
    give(by_ranks, MALLORY)
    good = capture_of(catalog, "good", ALICE)
    settle(catalog, 30 * 3600)
    (tmp_path / "store").mkdir()
    uploader = Uploader(catalog, Destination(f"file://{tmp_path}/store"))
    asyncio.run(uploader.upload_pending())
    assert [each.name for each in (tmp_path / "store").iterdir()] == [good.name]
    assert uploader.counts.results == {"uploaded": 1, "failed": 0, "refused": 0}
    assert some(folder.read(path, catalog.wall())).upload is Upload.NONE


@needs_root
def test_adopted_capture_has_to_be_the_scripts_own(catalog: Catalog) -> None:
    options, result = manifest.CaptureOptions(), Result(True, "", False, 5, "rank0.json", 2, "")
    for name, uid in (("20260726-101502-3fa1c2", ALICE), ("20260726-101502-3fa1c3", MALLORY)):
        (catalog.directory / name).mkdir()
        give(catalog.directory / name, uid)
        Coordinator(catalog).adopt(name, "r", options, 0, result, RankFacts(), owner=ALICE)
    written = [path.parent.name for path in catalog.directory.glob("*/manifest.json")]
    assert written == ["20260726-101502-3fa1c2"]


@needs_root
def test_planted_analysis_is_none_and_is_replaced(catalog: Catalog, tmp_path: Path) -> None:
    capture_of(catalog, "c0", ALICE)
    analysis = catalog.directory / "c0" / "analysis.json"
    analysis.write_text('{"ranks": [], "forged": "by Mallory"}')
    os.chown(analysis, MALLORY, MALLORY)
    assert not catalog.has_analysis("c0")
    with pytest.raises(TorchperfdError, match="has not been analysed"):
        catalog.analysis("c0")
    analysis.unlink()
    analysis.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("{}")
    assert not catalog.has_analysis("c0"), "a link is none either"


@needs_root
def test_capture_counts_for_the_user_of_most_of_its_bytes(catalog: Catalog) -> None:
    add(catalog, "mixed", {0: b"x" * 200_000, 1: b"x" * 200_000, 2: b"x" * 300_000})
    path = catalog.directory / "mixed"
    give(path, SERVICE)
    for name, uid in (("rank0.json", ALICE), ("rank1.json", ALICE), ("rank2.json", MALLORY)):
        os.chown(path / name, uid, uid)
    assert some(catalog.found("mixed")).owner == ALICE
