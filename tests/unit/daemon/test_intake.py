"""The intake of handed over files: whose, which, how large, and that they are kept whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.values import some

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace
from torchperfd_daemon.captures.retention import Quota
from torchperfd_daemon.errors import DiskFullError, NotAllowedError, TorchperfdError, UsageError
from torchperfd_daemon.service.handover import Sender, take

ID = "20260726-101502-3fa1c2"
ADA, BOB = 61_001, 61_002
SENDER = Sender("bert", 3, ADA)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "captures", Quota(capture_bytes=1000))


@contextlib.contextmanager
def files(**contents: bytes) -> Iterator[dict[str, int]]:
    """Yield descriptors by names; a name has __ for each dot."""
    descriptors = {}
    for name, content in contents.items():
        descriptors[name.replace("__", ".")] = descriptor = os.memfd_create(name)
        os.write(descriptor, content)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def manifest(**more: Any) -> bytes:
    known = {
        "rank": 3,
        "run": "another",
        "state": "complete",
        "reason": "",
        "file": "rank3.json",
        "bytes": 5,
        "sha256": "",
        "step_range": [1, 2],
        "options": {"steps": 1},
    }
    return json.dumps(known | more).encode()


def begin(catalog: Catalog, state: CaptureState = CaptureState.ARMED, **more: Any) -> None:
    """Make the folder of a capture of ranks 3 and 4."""
    catalog.create(ID)
    values: dict[str, Any] = {"run": "bert", "trigger": "command", "requested_at": 1e9, "state": state}
    ranks = [RankTrace(3, state, uid=ADA), RankTrace(4, state, uid=BOB)]
    catalog.save(CaptureRecord(capture_id=ID, ranks=ranks, **{**values, **more}))


def names(catalog: Catalog) -> set[str]:
    return {path.name for path in catalog.folder(ID).iterdir()}


def test_files_of_a_rank_of_the_capture_are_taken(catalog: Catalog) -> None:
    begin(catalog)
    with files(rank3__json=b"trace", rank3__manifest__json=manifest()) as sent:
        take(catalog, ID, SENDER, sent)
    assert names(catalog) == {"manifest.json", "rank3.json", "rank3.manifest.json"}
    assert (catalog.folder(ID) / "rank3.json").read_bytes() == b"trace"
    assert {path.stat().st_mode & 0o777 for path in catalog.folder(ID).iterdir()} == {0o600}


def test_capture_of_a_script_has_the_user_that_the_kernel_names(catalog: Catalog) -> None:
    with files(rank3__json=b"trace", rank3__manifest__json=manifest(uid=BOB)) as sent:
        take(catalog, ID, SENDER, sent)
    record = catalog.get(ID)
    assert (record.run, record.users, record.state) == ("bert", {ADA}, CaptureState.COMPLETE)
    found = some(catalog.found(ID))
    assert (found.managed, found.owner) == (True, ADA)


@pytest.mark.parametrize("sender", [Sender("bert", 5, ADA), Sender("bert", 3, BOB), Sender("gpt", 3, ADA)])
def test_rank_that_takes_no_part_is_refused(catalog: Catalog, sender: Sender) -> None:
    begin(catalog)
    name = f"rank{sender.rank}__json"
    with files(**{name: b"trace"}) as sent, pytest.raises(NotAllowedError, match="takes no part in capture"):
        take(catalog, ID, sender, sent)
    assert names(catalog) == {"manifest.json"}


def test_capture_that_has_ended_takes_nothing_more(catalog: Catalog) -> None:
    begin(catalog, CaptureState.COMPLETE)
    with files(rank3__json=b"trace") as sent, pytest.raises(TorchperfdError, match="has ended"):
        take(catalog, ID, SENDER, sent)


def test_trace_beyond_its_share_is_refused(catalog: Catalog) -> None:
    begin(catalog)
    with files(rank3__json=b"x" * 501) as sent, pytest.raises(TorchperfdError, match="501 bytes, 500 are"):
        take(catalog, ID, SENDER, sent)
    assert names(catalog) == {"manifest.json"}


def test_disk_without_room_refuses_and_leaves_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(catalog)
    monkeypatch.setattr(catalog, "lacking", lambda: 1)
    with files(rank3__json=b"trace") as sent, pytest.raises(DiskFullError, match="must stay free"):
        take(catalog, ID, SENDER, sent)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog, "lacking", lambda: 0)
    monkeypatch.setattr(os, "sendfile", full)
    with files(rank3__json=b"trace") as sent, pytest.raises(DiskFullError, match="is full"):
        take(catalog, ID, SENDER, sent)
    assert names(catalog) == {"manifest.json"}


def test_file_that_becomes_shorter_is_not_kept(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(catalog)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with files(rank3__json=b"trace") as sent, pytest.raises(TorchperfdError, match="became shorter"):
        take(catalog, ID, SENDER, sent)
    assert names(catalog) == {"manifest.json"}


@pytest.mark.parametrize(
    "name", ["rank4.json", "manifest.json", "analysis.json", ".pinned", "../rank3.json", "rank3.json/", ""]
)
def test_only_files_of_the_rank_itself_are_taken(catalog: Catalog, name: str) -> None:
    with files(x=b"trace") as sent, pytest.raises(UsageError, match="is no file of rank 3"):
        take(catalog, ID, SENDER, {name: sent["x"]})
    assert not catalog.directory.exists()


@pytest.mark.parametrize("capture_id", ["", "..", "../x", "one", f"{ID}/x", f"{ID}\n"])
def test_only_ids_of_captures_are_taken(catalog: Catalog, capture_id: str) -> None:
    with files(rank3__json=b"trace") as sent, pytest.raises(UsageError, match="is no capture id"):
        take(catalog, capture_id, SENDER, sent)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, manifest(rank=4)])
def test_manifest_that_is_none_is_refused(catalog: Catalog, content: bytes) -> None:
    with files(rank3__manifest__json=content) as sent, pytest.raises(UsageError):
        take(catalog, ID, SENDER, sent)
