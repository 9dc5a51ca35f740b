"""Receipts of uploads, and what the quota spares until there is one."""

import hashlib
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.values import some
from tests.unit.daemon.kept import BASE, add, ids, settle, stage, turn

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import (
    Destination,
    read_upload_marker,
    write_upload_marker,
)
from torchperfd_daemon.captures.manifest import RECEIPT_FILE, CaptureState, Receipt, Upload
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.captures.retention_worker import RetentionWorker
from torchperfd_daemon.captures.uploader import Uploader


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "torchperfd.captures")
    return caplog


def receipt(catalog: Catalog, capture_id: str, stage: Upload = Upload.DONE) -> Receipt:
    found = some(catalog.found(capture_id))
    return Receipt(stage, hashlib.sha256(found.document).hexdigest(), "s3://b/one", BASE)


def test_a_receipt_is_for_one_manifest_only(catalog: Catalog) -> None:
    record = add(catalog, "one")
    catalog.note_upload("one", receipt(catalog, "one"))
    assert [each.upload for each in catalog.list().captures] == [Upload.DONE]
    record.reason = "looked at again"
    catalog.save(record)
    assert stage(catalog, "one") is Upload.PENDING


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_receipt_or_marker_of_another_user_does_not_count(catalog: Catalog) -> None:
    """A receipt or an upload marker counts if the directory's owner wrote it."""
    add(catalog, "one")
    catalog.note_upload("one", receipt(catalog, "one"))
    os.chown(catalog.directory / "one" / RECEIPT_FILE, 12345, 12345)
    assert stage(catalog, "one") is Upload.PENDING
    write_upload_marker(catalog.directory, "s3://theirs")
    os.chown(catalog.directory / ".uploads-to", 12345, 12345)
    assert read_upload_marker(catalog.directory) == ""
    # Files of the directory's owner count as such for every reader.
    os.chown(catalog.directory, 12345, 12345)
    assert stage(catalog, "one") is Upload.DONE
    assert read_upload_marker(catalog.directory) == "s3://theirs"


@given(st.binary(max_size=200))
def test_whatever_lies_under_the_receipts_name_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("captures"))
    add(catalog, "one")
    (catalog.directory / "one" / RECEIPT_FILE).write_bytes(content)
    assert stage(catalog, "one") is Upload.PENDING


def enforce(catalog: Catalog, quota: Quota, *, uploads: bool = True) -> dict[str, int]:
    retention = RetentionWorker(Catalog(catalog.directory, quota, lambda: BASE + 100), uploads=uploads)
    retention.enforce()
    return {reason: count for reason, count in retention.counts.removed.items() if count}


def test_what_is_not_uploaded_yet_outlasts_the_quota(catalog: Catalog, tmp_path: Path) -> None:
    for number in range(4):
        add(catalog, f"c{number}", requested_at=BASE + number)
    catalog.note_upload("c2", receipt(catalog, "c2"))
    catalog.note_upload("c1", receipt(catalog, "c1", Upload.REFUSED))
    add(catalog, "failed", state=CaptureState.FAILED, requested_at=BASE + 9)
    assert enforce(catalog, Quota(count=1)) == {"count": 3}, "uploaded, refused and failed ones go"
    assert ids(catalog) == ["c3", "c0"]
    (tmp_path / "share").mkdir()
    turn(Uploader(catalog, Destination((tmp_path / "share").as_uri())))
    assert enforce(catalog, Quota(count=1)) == {"count": 1}
    assert ids(catalog) == ["c3"]


def test_the_disks_reserve_comes_before_what_is_not_uploaded(
    catalog: Catalog, said: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        add(catalog, f"c{number}", requested_at=BASE + number)
    catalog.pin("c0")
    assert enforce(catalog, Quota(free_bytes=2**62)) == {}, "what the quota allows stays on a full disk"
    assert enforce(catalog, Quota(count=2, free_bytes=2**62)) == {"reserve": 2}
    assert ids(catalog) == ["c3", "c0"]
    assert said.messages == [
        f"removed capture {each}, which had not been uploaded: the disk has too little room left"
        for each in ("c1", "c2")
    ]


def test_without_uploads_the_quota_is_what_it_was(catalog: Catalog) -> None:
    for number in range(3):
        add(catalog, f"c{number}", requested_at=BASE + number)
    assert enforce(catalog, Quota(count=1, free_bytes=2**62), uploads=False) == {"count": 2}


def test_missing_receipt_keeps_the_uploaded_state_of_the_index(catalog: Catalog) -> None:
    for number in range(2):
        add(catalog, f"c{number}", requested_at=BASE + number)
        catalog.note_upload(f"c{number}", receipt(catalog, f"c{number}"))
    settle(catalog)
    catalog.list()
    path = catalog.directory / "c0"
    before = path.stat()
    (path / RECEIPT_FILE).unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert enforce(catalog, Quota(count=1)) == {"count": 1}
    assert ids(catalog) == ["c0"]
