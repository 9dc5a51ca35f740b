"""Downloads: a capture comes whole through the daemon, and nothing else of the node does."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.commands import runner
from tests.support.served import Served, control, with_daemon
from tests.unit.daemon.kept import add

from torchperfd.v1 import control_pb2, control_pb2_grpc
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.service import caller_captures

HUGE = "x" * 10_000_000
HOSTILE = ["", ".", "..", "../one", "a/b", "/etc/passwd", "rank0.json\0", "-rf", ".pinned", "é", "\n", HUGE]
TRACE = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_captures, "_PIECE_BYTES", 10_000)


@pytest.fixture
def get(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[], tuple[int, str, str]]:
    """Run the command against the daemon."""
    return runner(capfd, "captures", "get", "one", "--socket", served.socket, "-o", str(tmp_path / "out"))


async def ask(channel: grpc.aio.Channel, **request: Any) -> tuple[bytes, list[Any]]:
    """Download; return the bytes and the pieces."""
    pieces = [piece async for piece in control(channel).Download(control_pb2.DownloadRequest(**request))]
    return b"".join(piece.data for piece in pieces), pieces


async def refusal(channel: grpc.aio.Channel, **request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(channel, **request)
    return caught.value.code(), caught.value.details() or ""


@with_daemon
async def test_a_file_comes_in_pieces_from_any_offset_on(served: Served, channel: grpc.aio.Channel) -> None:
    record = add(served.catalog, "one", {0: TRACE, 1: b""})
    for offset in (0, 1, 10_000, 255_999, 256_000):
        data, pieces = await ask(channel, capture_id="one", file="rank0.json", offset=offset)
        assert data == TRACE[offset:]
        assert {piece.size for piece in pieces} == {256_000}
        assert [piece.sha256 for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
        assert pieces[-1].sha256 == hashlib.sha256(TRACE[offset:]).hexdigest()
        assert max(len(piece.data) for piece in pieces) <= 10_000
    assert (await ask(channel, capture_id="one", file="rank1.json"))[0] == b""
    assert (await ask(channel, capture_id="one", file="manifest.json"))[0] == record.encode()


@with_daemon
async def test_hostile_names_get_a_clean_error(served: Served, channel: grpc.aio.Channel) -> None:
    add(served.catalog, "one")
    (served.catalog.directory / "one" / ".pinned").write_text("secret")
    for name in HOSTILE:
        for request in ({"capture_id": name, "file": "rank0.json"}, {"capture_id": "one", "file": name}):
            code, words = await refusal(channel, **request)
            # A request of megabytes is refused before it is read.
            expected = grpc.StatusCode.INVALID_ARGUMENT if name == HUGE else grpc.StatusCode.NOT_FOUND
            assert code is expected
            assert len(words) < 500
            assert words.isprintable()
    code, words = await refusal(channel, capture_id="one", file="rank0.json", offset=2**63)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words.startswith(f"'rank0.json' has 2 bytes, fewer than the offset {2**63}; ")


@pytest.mark.parametrize("planted", ["symlink", "hard link", "fifo", "directory", "another's", "gone"])
@with_daemon
async def test_what_a_manifest_names_may_be_a_trap(
    served: Served, channel: grpc.aio.Channel, tmp_path: Path, planted: str
) -> None:
    if planted == "another's" and os.geteuid():
        pytest.skip("giving a file away takes root")
    secret = tmp_path / "secret"
    secret.write_text("the daemon's alone")
    add(served.catalog, "one")
    path = served.catalog.directory / "one" / "rank0.json"
    path.unlink()
    match planted:
        case "symlink":
            path.symlink_to(secret)
        case "hard link":
            os.link(secret, path)
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "another's":
            path.write_text("hers")
            path.chmod(0o600)
            os.chown(path, 4711, 4711)
    code, words = await refusal(channel, capture_id="one", file="rank0.json")
    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
    assert {
        "hard link": "rank0.json has another hard link; copy it as its owner",
        "another's": "rank0.json belongs to user 4711, whose capture this is not; remove it as that user",
    }.get(
        planted, "capture one has no readable file rank0.json; list them with `torchperfd captures list`"
    ) == words


@with_daemon
async def test_a_folder_swapped_for_a_link_is_not_followed(
    served: Served, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    add(Catalog(tmp_path / "elsewhere"), "one")
    served.catalog.directory.mkdir()
    (served.catalog.directory / "one").symlink_to(tmp_path / "elsewhere" / "one")
    for name in ("manifest.json", "rank0.json"):
        assert (await refusal(channel, capture_id="one", file=name))[0] is grpc.StatusCode.NOT_FOUND


Get = Callable[[], tuple[int, str, str]]


def test_get_brings_a_whole_capture(served: Served, get: Get, tmp_path: Path) -> None:
    add(served.catalog, "one", {0: TRACE, 3: b"{}"})
    assert get() == (0, f"{tmp_path}/out/one\n", "")
    folder = tmp_path / "out" / "one"
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "rank0.json", "rank3.json"}
    for path in folder.iterdir():
        assert path.read_bytes() == (served.catalog.directory / "one" / path.name).read_bytes()
    assert get() == (1, "", f"torchperfd: {folder} exists; choose another directory with --output\n")


def cut_after(monkeypatch: pytest.MonkeyPatch, pieces: int) -> list[int]:
    """Close every stream of a trace after some pieces; return the offsets that were asked for."""
    offsets: list[int] = []

    class Cutting(control_pb2_grpc.ControlStub):
        def __init__(self, channel: grpc.Channel) -> None:
            super().__init__(channel)
            whole: Any = self.Download

            def some(request: control_pb2.DownloadRequest, timeout: float) -> Iterator[Any]:
                call = whole(request, timeout=timeout)
                if request.file == "manifest.json":
                    yield from call
                    return
                offsets.append(request.offset)
                for number, piece in enumerate(call):
                    if number == pieces:
                        call.cancel()
                    else:
                        yield piece

            self.Download = some  # type: ignore[assignment]

    monkeypatch.setattr(control_pb2_grpc, "ControlStub", Cutting)
    return offsets


def test_a_download_that_was_cut_goes_on_from_there(
    served: Served, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(served.catalog, "one", {0: TRACE})
    folder = tmp_path / "out" / "one"
    with monkeypatch.context() as context:
        offsets = cut_after(context, 7)
        for attempt in range(3):
            code, out, err = get()
            assert (code, out) == (4, "")
            assert err.endswith("; the same command resumes it\n")
            assert "torchperfd: the download was interrupted: " in err
            assert [path.name for path in folder.iterdir()] == [".rank0.json.part"]
            assert (folder / ".rank0.json.part").read_bytes() == TRACE[: 70_000 * (attempt + 1)]
        assert offsets == [0, 70_000, 140_000]
    assert get() == (0, f"{folder}\n", "rank0.json: going on after 0.2 MB\n")
    assert (folder / "rank0.json").read_bytes() == TRACE
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "rank0.json"}


@pytest.mark.parametrize("part", [b"something else", TRACE + b"too much", TRACE[:-1] + b"?"])
def test_a_part_of_something_else_is_begun_anew(
    served: Served, get: Get, tmp_path: Path, part: bytes
) -> None:
    add(served.catalog, "one", {0: TRACE})
    folder = tmp_path / "out" / "one"
    folder.mkdir(parents=True)
    (folder / ".rank0.json.part").write_bytes(part)
    assert get()[0] == 0
    assert (folder / "rank0.json").read_bytes() == TRACE


def test_a_trace_that_is_there_is_verified_not_fetched(
    served: Served, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(served.catalog, "one", {0: TRACE})
    folder = tmp_path / "out" / "one"
    folder.mkdir(parents=True)
    (folder / "rank0.json").write_bytes(TRACE[:-1] + b"?")
    code, _, err = get()
    assert (code, err) == (
        1,
        f"torchperfd: {folder}/rank0.json exists and is another file;"
        " choose another directory with --output\n",
    )
    (folder / "rank0.json").write_bytes(TRACE)
    offsets = cut_after(monkeypatch, 0)
    assert get()[0] == 0
    assert offsets == []


def test_a_trace_that_is_not_what_its_manifest_says_is_not_kept(
    served: Served, get: Get, tmp_path: Path
) -> None:
    add(served.catalog, "one", {0: TRACE})
    path = served.catalog.directory / "one" / "rank0.json"
    for content in (TRACE[:-1] + b"?", TRACE[:-1], TRACE + b"?"):
        path.write_bytes(content)
        code, out, err = get()
        assert (code, out) == (1, "")
        assert "rank0.json of one differs from its manifest, so it was not kept; " in err
        assert list((tmp_path / "out" / "one").iterdir()) == []


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", ".bashrc", "manifest.json", "a\0b"])
def test_a_daemon_cannot_choose_where_the_command_writes(
    served: Served, get: Get, tmp_path: Path, name: str
) -> None:
    record = add(served.catalog, "one")
    record.ranks[0].file = name
    served.catalog.save(record)
    code, out, err = get()
    assert (code, out) == (1, "")
    # No control character of a manifest reaches the terminal.
    shown = name.replace("\0", "?")
    assert f"the manifest of one names {shown!r}, which is no trace" in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_capture_that_the_daemon_has_not_is_named(get: Get, served: Served, tmp_path: Path) -> None:
    code, out, err = get()
    assert (code, out) == (3, "")
    assert err.startswith(f"torchperfd: no capture one in {served.catalog.directory}; ")
    assert not (tmp_path / "out").exists()


def test_what_only_ranks_wrote_down_comes_too(served: Served, get: Get, tmp_path: Path) -> None:
    record = add(served.catalog, "one")
    folder = served.catalog.directory / "one"
    (folder / "manifest.json").unlink()
    [trace] = record.ranks
    (folder / "rank0.manifest.json").write_text(
        json.dumps(
            {
                **{"rank": 0, "state": "complete", "reason": "", "file": trace.file, "bytes": trace.bytes},
                **{"sha256": trace.sha256, "step_range": [1, 2], "options": {}, "run": "bert"},
            }
        )
    )
    assert get()[0] == 0
    assert {path.name for path in (tmp_path / "out" / "one").iterdir()} == {"manifest.json", "rank0.json"}
    assert Catalog(tmp_path / "out").get("one").run == "bert"


def test_any_file_comes_whole_from_any_start(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short files in shorter pieces: as many pieces as of a long file, and ends that meet more often.
    monkeypatch.setattr(caller_captures, "_PIECE_BYTES", 10)
    names = (f"capture{number}" for number in itertools.count())

    @settings(max_examples=100)
    @given(content=st.binary(max_size=50), have=st.integers(0, 60))
    def comes_whole(content: bytes, have: int) -> None:
        name = next(names)
        add(served.catalog, name, {0: content})
        request = control_pb2.DownloadRequest(capture_id=name, file="rank0.json", offset=have)
        if have > len(content):
            with pytest.raises(grpc.RpcError) as caught:
                list(daemon.Download(request))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        else:
            pieces = [piece.data for piece in daemon.Download(request)]
            assert content[:have] + b"".join(pieces) == content
            assert max(map(len, pieces)) <= 10

    with grpc.insecure_channel(f"unix:{served.socket}") as channel:
        daemon = control_pb2_grpc.ControlStub(channel)
        comes_whole()
