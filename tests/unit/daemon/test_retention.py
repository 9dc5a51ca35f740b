"""Retention: what has to go, and that nothing else goes."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.daemon.kept import BASE, add, disk_bytes, ids, settle

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.folder import UNFINISHED_S
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState
from torchperfd_daemon.captures.retention import Kept, Quota, Reason, Removal, plan
from torchperfd_daemon.captures.retention_worker import RetentionWorker

NOW = 1000.0
KEPT = st.lists(
    st.builds(
        Kept,
        capture_id=st.text("abcdef", min_size=1, max_size=4),
        requested_at=st.integers(0, 1200).map(float),
        bytes=st.integers(0, 100),
        protected=st.booleans(),
    ),
    max_size=30,
    unique_by=lambda each: each.capture_id,
)
QUOTAS = st.builds(
    Quota, bytes=st.integers(0, 500), age_seconds=st.integers(0, 1000).map(float), count=st.integers(0, 10)
)


def broken(kept: Sequence[Kept], quota: Quota) -> list[Reason]:
    """Name the limits that captures are beyond, in the plan's order."""
    found = []
    if quota.age_seconds and any(NOW - each.requested_at > quota.age_seconds for each in kept):
        found.append(Reason.AGE)
    if quota.count and len(kept) > quota.count:
        found.append(Reason.COUNT)
    if quota.bytes and sum(each.bytes for each in kept) > quota.bytes:
        found.append(Reason.BYTES)
    return found


@given(KEPT, QUOTAS)
def test_the_oldest_go_one_by_one_until_the_quota_holds(kept: list[Kept], quota: Quota) -> None:
    """Recomputes the plan in the slow way: look at all that is left, take the oldest, look again."""
    left = sorted(kept, key=lambda each: (each.requested_at, each.capture_id))
    expected = []
    while free := [each for each in left if not each.protected]:
        oldest = free[0]
        too_old = bool(quota.age_seconds) and NOW - oldest.requested_at > quota.age_seconds
        reasons = [reason for reason in broken(left, quota) if reason is not Reason.AGE or too_old]
        if not reasons:
            break
        expected.append(Removal(oldest.capture_id, reasons[0]))
        left.remove(oldest)
    assert plan(kept, quota, NOW) == expected


@given(KEPT, QUOTAS)
def test_protected_captures_stay_and_quota_applies_to_the_rest(kept: list[Kept], quota: Quota) -> None:
    gone = {removal.capture_id for removal in plan(kept, quota, NOW)}
    left = [each for each in kept if each.capture_id not in gone]
    assert [each for each in kept if each.protected] == [each for each in left if each.protected]
    assert not broken(left, quota) or all(
        each.protected or broken(left, quota) == [Reason.AGE] for each in left
    )
    if not broken(kept, quota):
        assert not gone
    free_left = [each for each in left if not each.protected]
    for removed in (each for each in kept if each.capture_id in gone):
        assert all(
            (removed.requested_at, removed.capture_id) < (each.requested_at, each.capture_id)
            for each in free_left
        ), "none of the rest is older"
    for each in free_left:
        assert not quota.age_seconds or NOW - each.requested_at <= quota.age_seconds


@given(KEPT, QUOTAS, st.sets(st.text("abcdef", min_size=1, max_size=4)), st.integers(-50, 400))
def test_captures_not_uploaded_are_removed_last_for_space_only(
    kept: list[Kept], quota: Quota, unconfirmed: set[str], lacking: int
) -> None:
    """Recomputes the plan in two rounds: first what may go freely, then the rest until there is room."""
    kept = [replace(each, unconfirmed=each.capture_id in unconfirmed) for each in kept]
    spared = [replace(each, protected=each.protected or each.unconfirmed) for each in kept]
    expected = plan(spared, quota, NOW)
    gone = {removal.capture_id for removal in expected}
    room = sum(each.bytes for each in kept if each.capture_id in gone)
    left = [each for each in kept if each.capture_id not in gone]
    for removal in plan([replace(each, unconfirmed=False) for each in left], quota, NOW):
        if room >= lacking:
            break
        room += next(each.bytes for each in kept if each.capture_id == removal.capture_id)
        expected.append(Removal(removal.capture_id, Reason.RESERVE))
    assert plan(kept, quota, NOW, lacking) == expected


def test_no_quota_removes_nothing() -> None:
    assert plan([Kept("a", 0.0, 10**18, False)], Quota(), 1e12) == []


def enforce(catalog: Catalog, now: float = BASE + 100, **quota: float) -> dict[str, int]:
    """Sweep once; return how many captures went, by reason."""
    retention = RetentionWorker(Catalog(catalog.directory, Quota(**quota), lambda: now))  # type: ignore[arg-type]
    retention.enforce()
    assert retention.counts.captures == len(ids(catalog))
    assert retention.counts.bytes == sum(
        disk_bytes(catalog.directory / capture_id) for capture_id in ids(catalog)
    )
    return {reason: count for reason, count in retention.counts.removed.items() if count}


def fill(catalog: Catalog, count: int) -> None:
    for number in range(count):
        add(catalog, f"capture-{number}", requested_at=BASE + number)


def test_each_limit_is_kept_and_counted(catalog: Catalog) -> None:
    fill(catalog, 6)
    assert enforce(catalog) == {}
    assert enforce(catalog, count=5) == {"count": 1}
    assert ids(catalog)[-1] == "capture-1"
    assert enforce(catalog, age_seconds=98.5) == {"age": 1}
    each = disk_bytes(catalog.directory / "capture-5")
    assert enforce(catalog, bytes=2 * each) == {"bytes": 2}
    assert ids(catalog) == ["capture-5", "capture-4"]
    assert {path.name for path in catalog.directory.iterdir()} == {"capture-5", "capture-4", ".index"}


def test_what_is_pinned_stays_until_it_is_unpinned(catalog: Catalog) -> None:
    fill(catalog, 3)
    catalog.pin("capture-0")
    catalog.pin("capture-0")
    assert enforce(catalog, count=1) == {"count": 2}
    assert ids(catalog) == ["capture-0"]
    catalog.pin("capture-0", pinned=False)
    catalog.pin("capture-0", pinned=False)
    assert enforce(catalog, age_seconds=1) == {"age": 1}


def test_a_pin_that_the_index_has_not_seen_protects(catalog: Catalog) -> None:
    fill(catalog, 3)
    settle(catalog)
    catalog.list()
    folder = catalog.directory / "capture-0"
    before = folder.stat()
    (folder / ".pinned").touch()
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not any(listed.pinned for listed in catalog.list().captures), "no reader can have seen it"
    assert enforce(catalog, count=1) == {"count": 2}
    assert ids(catalog) == ["capture-0"]


def test_what_is_in_progress_stays(catalog: Catalog) -> None:
    fill(catalog, 2)
    add(catalog, "going", requested_at=BASE - 50, state=CaptureState.ARMED)
    catalog.create("20231114-221300-abcdef")
    changed = (catalog.directory / "going").stat().st_mtime
    assert enforce(catalog, changed + 1, count=1) == {"count": 2}
    assert set(ids(catalog)) == {"going", "20231114-221300-abcdef"}
    assert {listed.record.state for listed in catalog.list().captures} == {
        CaptureState.ARMED,
        CaptureState.PREPARING,
    }


@pytest.mark.parametrize("manifest", [False, True])
def test_what_was_never_finished_goes_after_a_day(catalog: Catalog, manifest: bool) -> None:
    folder = catalog.create("20231114-221300-abcdef")
    if manifest:
        catalog.save(CaptureRecord("20231114-221300-abcdef", "bert-17", "command", BASE))
    (folder / ".rank0.json.part").write_bytes(b"x" * 100_000)
    changed = folder.stat().st_mtime
    assert enforce(catalog, changed + UNFINISHED_S - 60, bytes=1) == {}
    assert enforce(catalog, changed + UNFINISHED_S + 60, bytes=1) == {"bytes": 1}
    assert not folder.exists()


def test_what_went_on_unseen_by_the_index_stays(catalog: Catalog) -> None:
    """Ranks of a script may add to a capture that looked long ended."""
    add(catalog, "old")
    folder = catalog.directory / "old"
    manifest = {
        **{"rank": 0, "state": "complete", "reason": "", "file": "rank0.json", "bytes": 2, "sha256": ""},
        **{"step_range": [1, 2], "options": {}},
    }
    (folder / "manifest.json").unlink()
    (folder / "rank0.manifest.json").write_text(json.dumps(manifest))
    settle(catalog, UNFINISHED_S + 3600)
    retention = RetentionWorker(Catalog(catalog.directory, Quota(count=1)))
    retention.enforce()
    (folder / "rank1.json").touch()
    add(catalog, "new", requested_at=folder.stat().st_mtime + 1)
    retention.enforce()
    assert ids(catalog) == ["old"]


def test_what_is_no_capture_is_never_touched(catalog: Catalog, tmp_path: Path) -> None:
    fill(catalog, 1)
    others = [
        catalog.directory / name for name in ("thesis", "20231114-221300-zzzzzz", "99999999-999999-abcdef")
    ]
    for path in others:
        path.mkdir()
        (path / "rank0.json").write_text("precious")
    outside = tmp_path / "outside"
    add(Catalog(outside), "linked")
    (catalog.directory / "linked").symlink_to(outside / "linked")
    (catalog.directory / "note").write_text("hello")
    settle(catalog, UNFINISHED_S + 3600)
    assert enforce(catalog, bytes=1) == {"bytes": 1}
    assert all((path / "rank0.json").exists() for path in (*others, outside / "linked"))
    assert (catalog.directory / "note").exists()
    assert (catalog.directory / "linked").is_symlink()


def test_a_file_full_of_holes_pushes_nothing_out(catalog: Catalog) -> None:
    fill(catalog, 2)
    with (catalog.directory / "capture-1" / "huge").open("wb") as file:
        file.truncate(2**40)
    assert enforce(catalog, bytes=2**20) == {}


def test_one_that_cannot_go_is_said_once_and_the_next_goes(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(catalog, 3)
    rename = os.rename

    def refuse(source: str, target: str, **directories: int) -> None:
        if source == "capture-0":
            raise PermissionError(1, "Operation not permitted")
        rename(source, target, **directories)

    monkeypatch.setattr(os, "rename", refuse)
    retention = RetentionWorker(Catalog(catalog.directory, Quota(count=2)))
    retention.enforce()
    retention.enforce()
    assert ids(catalog) == ["capture-2", "capture-0"]
    assert retention.counts.removed["count"] == 1
    fill_more = add(catalog, "capture-9", requested_at=BASE + 9)
    retention.enforce()
    assert ids(catalog) == [fill_more.capture_id, "capture-0"]
    assert [record.message for record in caplog.records].count(
        "capture capture-0 stays although the quota is used up: "
        f"cannot delete {catalog.directory}/capture-0: Operation not permitted; delete it as its owner"
    ) == 1


def test_an_interrupted_deletion_is_finished(catalog: Catalog) -> None:
    fill(catalog, 1)
    (catalog.directory / "capture-0").rename(catalog.directory / ".removed-0123456789abcdef")
    assert ids(catalog) == []
    enforce(catalog)
    assert {path.name for path in catalog.directory.iterdir()} <= {".index"}


def test_a_directory_that_is_not_there_yet_is_empty(catalog: Catalog) -> None:
    assert enforce(catalog, count=1) == {}
    assert not catalog.directory.exists()


def test_retention_with_a_directory_measures_its_disk(catalog: Catalog) -> None:
    retention = RetentionWorker(catalog)
    retention.enforce()
    if not catalog.directory.exists():
        assert (retention.counts.disk_free_bytes, retention.counts.disk_size_bytes) == (0, 0)
    add(catalog, "20260101T000000Z-aaaaaa")
    retention.enforce()
    assert 0 < retention.counts.disk_free_bytes <= retention.counts.disk_size_bytes


def test_retention_with_an_absent_directory_has_no_disk(catalog: Catalog) -> None:
    retention = RetentionWorker(catalog)
    retention.counts.disk_free_bytes = retention.counts.disk_size_bytes = 1
    if catalog.directory.exists():
        catalog.directory.rmdir()
    retention.measure_disk()
    assert (retention.counts.disk_free_bytes, retention.counts.disk_size_bytes) == (0, 0)
