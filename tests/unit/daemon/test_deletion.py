"""Deletion of trees that are deep, large or another user's, and rounds of retention beside them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.as_user import USERS
from tests.unit.daemon.kept import BASE, add, ids, settle

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.retention import Quota, delete_tree
from torchperfd_daemon.captures.retention_worker import RetentionWorker

BOB = USERS[1]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "captures", Quota(count=2))


def nest(path: Path, levels: int) -> None:
    """Make a directory with directories in it, so many levels deep."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    name = path.name
    for _ in range(levels):
        os.mkdir(name, dir_fd=descriptor)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor, name = below, "a"
    os.close(descriptor)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fill(catalog: Catalog, count: int) -> None:
    for number in range(count):
        add(catalog, f"capture-{number}", requested_at=BASE + number)
    settle(catalog)


@pytest.mark.parametrize("levels", [1, 2, 50, 3000])
def test_delete_tree_of_any_depth_leaves_nothing(tmp_path: Path, levels: int) -> None:
    nest(tmp_path / "deep", levels)
    with held(tmp_path) as parent:
        assert delete_tree("deep", parent)
    assert not any(tmp_path.iterdir())


def test_delete_tree_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    nest(tmp_path / "gone", 2)
    for place in (tmp_path / "gone", tmp_path / "gone" / "a"):
        (place / "link").symlink_to(tmp_path / "kept")
        os.mkfifo(place / "pipe")
    with held(tmp_path) as parent:
        assert delete_tree("gone", parent)
        (tmp_path / "link").symlink_to(tmp_path / "kept")
        with pytest.raises(OSError):
            delete_tree("link", parent)
    assert (tmp_path / "kept" / "file").exists()


def test_delete_tree_beyond_its_bound_continues_later(tmp_path: Path) -> None:
    nest(tmp_path / "gone", 3)
    for number in range(30):
        (tmp_path / "gone" / "a" / f"file{number}").touch()
    with held(tmp_path) as parent:
        rounds = 1
        while not delete_tree("gone", parent, most=10):
            rounds += 1
            assert rounds < 20
    assert rounds > 2
    assert not any(tmp_path.iterdir())


def test_retention_with_deep_trash_still_enforces_its_quota(catalog: Catalog) -> None:
    fill(catalog, 4)
    nest(catalog.directory / ".removed-deep", 3000)
    nest(catalog.directory / "capture-0" / "deep", 3000)
    settle(catalog)
    retention = RetentionWorker(catalog)
    retention.enforce()
    assert ids(catalog) == ["capture-3", "capture-2"]
    assert {path.name for path in catalog.directory.iterdir()} == {".index", "capture-2", "capture-3"}


def test_retention_with_a_failed_purge_enforces_its_quota(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(catalog, 3)
    retention = RetentionWorker(catalog)
    purges = []

    def fail() -> None:
        purges.append(1)
        raise RecursionError("too deep")

    monkeypatch.setattr(catalog, "purge_trash", fail)
    with pytest.raises(RecursionError):
        retention.enforce()
    assert ids(catalog) == ["capture-2", "capture-1"]
    assert retention.counts.captures == 2
    assert retention.counts.disk_size_bytes > 0
    # Not again before an hour has passed.
    retention.enforce()
    assert len(purges) == 1


def test_retention_with_one_bad_capture_removes_the_next(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(catalog, 4)
    remove = catalog.remove

    def fail(capture_id: str) -> None:
        if capture_id == "capture-0":
            raise ValueError("unexpected")
        remove(capture_id)

    monkeypatch.setattr(catalog, "remove", fail)
    RetentionWorker(catalog).enforce()
    assert ids(catalog) == ["capture-3", "capture-0"]


@as_root
def test_purge_trash_leaves_another_users_directory_alone(catalog: Catalog) -> None:
    fill(catalog, 1)
    for name, owner in ((".removed-own", 0), (".removed-bob", BOB)):
        nest(catalog.directory / name, 2)
        os.chown(catalog.directory / name, owner, owner)
    catalog.purge_trash()
    assert {path.name for path in catalog.directory.glob(".removed-*")} == {".removed-bob"}


@as_root
def test_retention_beside_1000_hostile_entries_enforces_quota(catalog: Catalog) -> None:
    fill(catalog, 5)
    directory = catalog.directory
    for number in range(200):
        (directory / f"link-{number}").symlink_to(directory / "capture-4")
        os.mkfifo(directory / f"pipe-{number}")
        planted = directory / f"20260101-000000-{number:06x}"
        planted.mkdir(mode=0o700)
        (planted / "manifest.json").write_text("[" * 100_000)
        os.mkfifo(planted / "rank0.manifest.json")
        (planted / ".pinned").touch()
        nest(directory / f".removed-{number}", 5)
        (directory / f"file-{number}").touch()
        for path in (planted, *planted.iterdir(), directory / f".removed-{number}"):
            os.chown(path, BOB, BOB)
    settle(catalog)
    RetentionWorker(catalog).enforce()
    own = [each for each in ids(catalog) if each.startswith("capture-")]
    assert own == ["capture-4", "capture-3"]
