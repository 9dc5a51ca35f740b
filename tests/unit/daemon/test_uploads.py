"""Uploads: every capture that has ended arrives whole, whatever the store or the daemon does meanwhile."""

import asyncio
import hashlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.object_store import BUCKET, ObjectStore
from tests.support.clock import Clock
from tests.support.values import some
from tests.unit.daemon.kept import BASE, add, settle, stage, turn

from torchperfd_daemon.captures import folder
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import (
    ChangedError,
    Destination,
    UploadError,
)
from torchperfd_daemon.captures.manifest import CaptureState, RankTrace, Receipt, Upload
from torchperfd_daemon.captures.uploader import Uploader, upload
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

PREFIX = f"s3://{BUCKET}/nodes/a"
PART = 5 * 2**20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path_factory.mktemp("store"))
    try:
        store.start()
        yield store
    finally:
        store.stop()


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """One that runs for all tests of this file; each has names of its own in it."""
    use(running, monkeypatch)
    return running


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """One that the test starts and stops."""
    store = ObjectStore(tmp_path)
    use(store, monkeypatch)
    try:
        yield store
    finally:
        store.stop()


def use(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "torchperfd.captures")
    return caplog


def at(store: ObjectStore, prefix: str) -> list[str]:
    """Return what lies below a prefix of the store's, without it."""
    return [key.removeprefix(f"{prefix}/") for key in store.held() if key.startswith(f"{prefix}/")]


def send(destination: Destination, key: str, content: bytes, file: BinaryIO | None = None) -> int:
    digest = hashlib.sha256(content).hexdigest()
    return asyncio.run(destination.put(key, file or io.BytesIO(content), len(content), digest))


# What arrives, and in which order.


def test_a_capture_arrives_whole_and_its_manifest_last(
    catalog: Catalog, store: ObjectStore, said: pytest.LogCaptureFixture
) -> None:
    large = os.urandom(2 * PART + 17)
    add(catalog, "whole", {0: b'{"traceEvents": []}', 1: large, 2: b"x" * PART})
    uploader = Uploader(catalog, Destination(f"{PREFIX}/"))
    turn(uploader)
    assert at(store, "nodes/a/whole") == ["manifest.json", "rank0.json", "rank1.json", "rank2.json"]
    puts = [key for key in store.puts() if key.startswith("nodes/a/whole/")]
    assert puts[-1] == "nodes/a/whole/manifest.json"
    assert puts.count("nodes/a/whole/rank1.json") == 3, "in parts"
    assert (
        store.content("nodes/a/whole/manifest.json")
        == (catalog.directory / "whole/manifest.json").read_bytes()
    )
    assert store.content("nodes/a/whole/rank0.json") == b'{"traceEvents": []}'
    # Whatever came back is compared with the digest that is asked for.
    assert send(Destination(PREFIX), "whole/rank1.json", large) == 0
    assert stage(catalog, "whole") is Upload.DONE
    assert [each.upload for each in catalog.list().captures] == [Upload.DONE]
    manifest_bytes = (catalog.directory / "whole/manifest.json").stat().st_size
    assert uploader.counts.results == {"uploaded": 1, "failed": 0, "refused": 0}
    assert uploader.counts.bytes == 19 + len(large) + PART + manifest_bytes
    assert uploader.counts.pending == 0
    assert uploader.counts.last_success_unix_seconds > BASE
    assert said.messages == [f"uploaded capture whole to {PREFIX}/whole"]


def test_a_capture_is_never_counted_as_both_uploaded_and_pending(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        add(catalog, f"c{number}", requested_at=BASE + number)
    (tmp_path / "share").mkdir()
    uploader = Uploader(catalog, Destination((tmp_path / "share").as_uri()))
    seen = []
    note = Catalog.note_upload

    def noting(self: Catalog, capture_id: str, receipt: Receipt) -> None:
        seen.append((uploader.counts.results["uploaded"], uploader.counts.pending))
        note(self, capture_id, receipt)
        seen.append((uploader.counts.results["uploaded"], uploader.counts.pending))

    monkeypatch.setattr(Catalog, "note_upload", noting)
    turn(uploader)
    assert seen == [(0, 3), (0, 3), (1, 2), (1, 2), (2, 1), (2, 1)]
    assert (uploader.counts.results["uploaded"], uploader.counts.pending) == (3, 0)


def test_only_what_has_ended_with_traces_is_uploaded(catalog: Catalog, store: ObjectStore) -> None:
    failed = RankTrace(1, CaptureState.FAILED, "gone")
    record = add(catalog, "partial", requested_at=BASE + 1)
    record.state, record.ranks = CaptureState.PARTIAL, [*record.ranks, failed]
    catalog.save(record)
    add(catalog, "failed", state=CaptureState.FAILED, ranks=[failed])
    add(catalog, "armed", state=CaptureState.ARMED)
    catalog.create("20231114-221320-abcdef")
    turn(Uploader(catalog, Destination(f"{PREFIX}/ended")))
    assert at(store, "nodes/a/ended") == ["partial/manifest.json", "partial/rank0.json"]
    for capture_id in ("failed", "armed"):
        with pytest.raises(TorchperfdError, match="so it is not uploaded"):
            asyncio.run(upload(catalog, Destination(PREFIX), capture_id))
    with pytest.raises(NoSuchTargetError):
        asyncio.run(upload(catalog, Destination(PREFIX), "never"))


def test_capture_written_by_ranks_only_is_uploaded_once_quiet(catalog: Catalog, store: ObjectStore) -> None:
    record = add(catalog, "script")
    path = catalog.directory / "script"
    (path / "manifest.json").unlink()
    digest = record.ranks[0].sha256
    (path / "rank0.manifest.json").write_text(
        '{"rank": 0, "state": "complete", "reason": "", "file": "rank0.json", "bytes": 2,'
        f' "sha256": "{digest}", "step_range": [1, 2], "options": {{}}}}'
    )
    assert stage(catalog, "script") is Upload.NONE
    settle(catalog, folder.UNFINISHED_S + 60)
    destination = Destination(f"{PREFIX}/script-only")
    turn(Uploader(catalog, destination))
    assert at(store, "nodes/a/script-only") == ["script/manifest.json", "script/rank0.json"]
    found = some(catalog.found("script"))
    assert store.content("nodes/a/script-only/script/manifest.json") == some(found.record).encode()
    settle(catalog, folder.UNFINISHED_S + 60)
    assert stage(catalog, "script") is Upload.DONE


def test_the_oldest_goes_first_and_nothing_goes_twice(catalog: Catalog, store: ObjectStore) -> None:
    for number in (2, 0, 1):
        add(catalog, f"c{number}", requested_at=BASE + number)
    for _ in range(2):
        turn(Uploader(catalog, Destination(f"{PREFIX}/order")))
    puts = [key for key in store.puts() if "/order/" in key]
    assert puts == [
        f"nodes/a/order/c{n}/{name}" for n in range(3) for name in ("rank0.json", "manifest.json")
    ]


def test_a_share_takes_the_same_files(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one", {0: b"trace", 1: bytes(PART + 1)})
    share = tmp_path / "my share"
    uploader = Uploader(catalog, Destination(f"file://{tmp_path}/my%20share"))
    turn(uploader)
    assert uploader.counts.results["failed"] == 1, "it is not mounted"
    assert not share.exists()
    share.mkdir()
    turn(Uploader(catalog, Destination(f"file://{tmp_path}/my%20share")))
    assert {path.name: path.read_bytes() for path in (share / "one").iterdir()} == {
        name: (catalog.directory / "one" / name).read_bytes()
        for name in ("manifest.json", "rank0.json", "rank1.json")
    }
    assert stage(catalog, "one") is Upload.DONE


def test_what_a_share_holds_is_read_before_it_counts(tmp_path: Path) -> None:
    destination = Destination(tmp_path.as_uri())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rank0.json").write_bytes(b"other")
    assert send(destination, "one/rank0.json", b"trace") == 5
    assert send(destination, "one/rank0.json", b"trace") == 0
    assert (tmp_path / "one" / "rank0.json").read_bytes() == b"trace"


# A store that fails.


def test_a_store_that_was_down_gets_it_all_when_it_is_back(
    catalog: Catalog, own_store: ObjectStore, clock: Clock, said: pytest.LogCaptureFixture
) -> None:
    add(catalog, "c0")
    add(catalog, "c1", {0: bytes(PART + 1)}, requested_at=BASE + 1)
    own_store.start()
    uploader = Uploader(catalog, Destination(PREFIX), clock, chance=lambda: 0.0)
    own_store.stop()
    assert turn(uploader) == 2.0
    assert uploader.counts.results == {"uploaded": 0, "failed": 1, "refused": 0}, "one try, whatever waits"
    assert uploader.counts.pending == 2
    [line] = said.messages
    assert line.startswith(f"capture c0 is not uploaded yet: {PREFIX} did not take c0/rank0.json: ")
    assert line.endswith("; check that this node can reach it; next try in 2 s")
    own_store.start()
    assert turn(uploader) == 2.0, "it is not time yet"
    assert own_store.held() == []
    clock.now += 2
    turn(uploader)
    assert at(own_store, "nodes/a") == [
        f"{each}/{name}" for each in ("c0", "c1") for name in ("manifest.json", "rank0.json")
    ]
    assert uploader.counts.results == {"uploaded": 2, "failed": 1, "refused": 0}
    assert uploader.counts.pending == 0


class Failing(Destination):
    """A destination that does not take some captures, and notes what it was asked for."""

    def __init__(self, url: str, never: tuple[str, ...] = ()) -> None:
        super().__init__(url)
        self.never = never
        self.asked: list[str] = []

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        """Take it, or not."""
        self.asked.append(key)
        if key.partition("/")[0] in self.never:
            raise UploadError(f"no {key}", "wait")
        return await super().put(key, file, size, sha256)


@pytest.mark.parametrize(("chance", "share"), [(0.0, 1.0), (0.5, 0.75)])
def test_upload_delay_doubles_to_15_min_and_success_resets_it(
    catalog: Catalog, tmp_path: Path, clock: Clock, chance: float, share: float
) -> None:
    add(catalog, "one")
    (tmp_path / "share").mkdir()
    destination = Failing((tmp_path / "share").as_uri(), ("one",))
    uploader = Uploader(catalog, destination, clock, chance=lambda: chance)
    delays = []
    for _ in range(12):
        tries = len(destination.asked)
        began = clock.now
        while len(destination.asked) == tries:
            pause = turn(uploader)
            clock.now += pause if len(destination.asked) == tries else 0
            assert 0 < pause <= 10
        delays.append(clock.now - began)
    assert delays == pytest.approx(
        [each * share for each in (0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900)], abs=1.01
    )
    destination.never = ()
    clock.now += 900
    turn(uploader)
    assert uploader.counts.results["uploaded"] == 1
    destination.never = ("two",)
    add(catalog, "two")
    assert turn(uploader) == pytest.approx(max(1.0, 2 * share), abs=0.1)


def test_one_that_is_never_taken_keeps_no_other_waiting(
    catalog: Catalog, tmp_path: Path, clock: Clock
) -> None:
    for number in range(4):
        add(catalog, f"c{number}", requested_at=BASE + number)
    (tmp_path / "share").mkdir()
    destination = Failing((tmp_path / "share").as_uri(), ("c0", "c2"))
    uploader = Uploader(catalog, destination, clock, chance=lambda: 0.0)
    for _ in range(3):
        turn(uploader)
        clock.now += 900
    assert [stage(catalog, f"c{number}") for number in range(4)] == [
        Upload.PENDING,
        Upload.DONE,
        Upload.PENDING,
        Upload.DONE,
    ]
    assert uploader.counts.pending == 2


def test_uploads_continue_after_a_bug_or_unreadable_directory(
    catalog: Catalog, tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "one")
    (tmp_path / "share").mkdir()
    troubles = iter([RuntimeError("a bug"), TorchperfdError("cannot read it"), None])
    pauses: list[float] = []

    class Troubled(Uploader):
        async def upload_pending(self) -> float:
            """Fail twice, then upload."""
            trouble = next(troubles)
            if trouble is not None:
                raise trouble
            return await super().upload_pending()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    uploader = Troubled(catalog, Destination((tmp_path / "share").as_uri()))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(uploader.run())
    assert pauses[:2] == [900, 10]
    assert said.messages[:2] == [
        "captures are not uploaded: a bug of torchperfd or of obstore",
        "captures are not uploaded: cannot read it",
    ]
    assert stage(catalog, "one") is Upload.DONE


@pytest.mark.parametrize("size", [10, PART + 1])
def test_a_bucket_that_is_not_there_is_said(catalog: Catalog, store: ObjectStore, size: int) -> None:
    with pytest.raises(UploadError) as caught:
        send(Destination("s3://nowhere/x"), "one/rank0.json", bytes(size))
    assert str(caught.value) == (
        "s3://nowhere/x has no bucket or directory for one/rank0.json: The specified bucket does not exist;"
        " create the bucket, or correct the URL"
    )


def test_credentials_that_are_wrong_are_said_and_counted(
    catalog: Catalog, own_store: ObjectStore, said: pytest.LogCaptureFixture
) -> None:
    # The first request, which makes the bucket, is not checked; all others are.
    own_store.start(INITIAL_NO_AUTH_ACTION_COUNT="1")
    add(catalog, "one")
    uploader = Uploader(catalog, Destination(PREFIX))
    turn(uploader)
    assert uploader.counts.results == {"uploaded": 0, "failed": 1, "refused": 0}
    [line] = said.messages
    assert line.startswith(f"capture one is not uploaded yet: {PREFIX} refuses one/rank0.json: ")
    assert "403 Forbidden; check the credentials in the daemon's environment" in line
    assert stage(catalog, "one") is Upload.PENDING


# A daemon that goes away in the middle.


class Killed(BaseException):
    """What stands for the end of the process."""


class Cut(Destination):
    """A destination after whose n-th file the process is gone."""

    def __init__(self, url: str, files: int) -> None:
        super().__init__(url)
        self.left = files

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        """Take it, or end."""
        if not self.left:
            raise Killed
        self.left -= 1
        return await super().put(key, file, size, sha256)


@pytest.mark.parametrize("files", [0, 1, 2, 3, 4])
def test_the_next_daemon_goes_on_where_one_was_killed(
    catalog: Catalog, store: ObjectStore, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"nodes/a/killed{files}"
    add(catalog, "one", {rank: b"x" * (rank + 1) for rank in range(3)})
    with monkeypatch.context() as context:
        # Had it not been one after another, which of them had arrived would be left to chance.
        context.setattr("torchperfd_daemon.captures.uploader._FILES_AT_ONCE", 1)
        uploader = Uploader(catalog, Cut(f"s3://{BUCKET}/{prefix}", files))
        if files == 4:
            context.setattr(catalog, "note_upload", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises((Killed, BaseExceptionGroup)):
            turn(uploader)
    assert len(at(store, prefix)) == files
    assert ("one/manifest.json" in at(store, prefix)) == (files == 4)
    assert stage(catalog, "one") is Upload.PENDING
    turn(Uploader(Catalog(catalog.directory), Destination(f"s3://{BUCKET}/{prefix}")))
    assert stage(catalog, "one") is Upload.DONE
    puts = [key.removeprefix(f"{prefix}/one/") for key in store.puts() if key.startswith(f"{prefix}/")]
    assert sorted(puts) == ["manifest.json", "rank0.json", "rank1.json", "rank2.json"], "each once"
    assert puts[-1] == "manifest.json"


# Files that are not what they were.


def spoil(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (spoil, "one/rank1.json does not have the SHA-256 in its manifest"),
        (lambda path: path.write_bytes(b""), "one/rank1.json does not have the size in its manifest"),
        (Path.unlink, "capture one has no readable file rank1.json"),
        (
            lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
            "capture one has no readable",
        ),
        (lambda path: path.with_name("x").hardlink_to(path), "rank1.json has another hard link"),
    ],
)
def test_changed_capture_is_refused_once_and_never_complete(
    catalog: Catalog,
    store: ObjectStore,
    said: pytest.LogCaptureFixture,
    request: Any,
    change: Any,
    reason: str,
) -> None:
    prefix = f"nodes/a/{hashlib.sha256(request.node.name.encode()).hexdigest()}"
    content = {0: b"good", 1: os.urandom(PART + 9)}
    add(catalog, "one", content)
    change(catalog.directory / "one" / "rank1.json")
    uploader = Uploader(catalog, Destination(f"s3://{BUCKET}/{prefix}"))
    for _ in range(3):
        turn(uploader)
    assert uploader.counts.results == {"uploaded": 0, "failed": 0, "refused": 1}
    assert (uploader.counts.pending, uploader.counts.bytes) == (0, 0)
    [line] = said.messages
    assert line.startswith(f"capture one is not uploaded and not retried: {reason}")
    assert stage(catalog, "one") is Upload.REFUSED
    assert at(store, prefix) in ([], ["one/rank0.json"])
    assert store.unfinished() == []


class Moving(io.BytesIO):
    """A file that somebody writes to while it is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next piece, and spoil what comes after it."""
        piece = super().read(size)
        if piece and self.tell() == len(piece):
            self.getbuffer()[-1] ^= 1
        return piece


def test_a_file_that_changes_while_it_is_sent_leaves_nothing(store: ObjectStore) -> None:
    content = os.urandom(2 * PART + 9)
    with pytest.raises(ChangedError, match="does not have the SHA-256"):
        send(Destination(PREFIX), "moving/rank0.json", content, Moving(content))
    assert at(store, "nodes/a/moving") == []
    assert store.unfinished() == []


def test_a_name_that_could_lead_elsewhere_is_refused(catalog: Catalog, store: ObjectStore) -> None:
    for number, name in enumerate(("../../x", "manifest.json", "/etc/passwd", ".hidden", "a\nb")):
        traces = [RankTrace(0, CaptureState.COMPLETE, "", name, 2, "ab")]
        add(catalog, f"c{number}", ranks=traces)
    uploader = Uploader(catalog, Destination(f"{PREFIX}/names"))
    turn(uploader)
    assert uploader.counts.results == {"uploaded": 0, "failed": 0, "refused": 5}
    assert at(store, "nodes/a/names") == []


def test_a_capture_that_goes_while_it_waits_is_forgotten(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    (tmp_path / "share").mkdir()

    class Removing(Destination):
        async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
            catalog.remove("one")
            raise ChangedError("it is not there")

    uploader = Uploader(catalog, Removing((tmp_path / "share").as_uri()))
    turn(uploader)
    assert uploader.counts.results == {"uploaded": 0, "failed": 0, "refused": 0}
    assert uploader.counts.pending == 0


def test_unwritable_receipt_is_logged_once_without_resending(
    catalog: Catalog, store: ObjectStore, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "one")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "write", refuse)
    uploader = Uploader(catalog, Destination(f"{PREFIX}/unnoted"))
    turn(uploader)
    turn(uploader)
    assert uploader.counts.results == {"uploaded": 1, "failed": 0, "refused": 0}
    assert said.messages == [
        "cannot record the upload of one in its folder: Permission denied; upload it as its owner",
        f"uploaded capture one to {PREFIX}/unnoted/one",
    ]
    # The next daemon finds that all is there.
    puts = len(store.puts())
    turn(Uploader(catalog, Destination(f"{PREFIX}/unnoted")))
    assert len(store.puts()) == puts
