"""``torchperfd analyze`` of memory snapshots: its page, its JSON, the files that it finds, its exit codes."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tests.support.golden import GOLDEN, check_golden
from tests.unit.daemon.memory_snapshots import ACTIVATIONS, MIB, block, fragmented, segment, write


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Return the folder of a capture of three ranks, of which rank 10 has reserved most."""
    folder = tmp_path / "20260101-120000-abcd"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    for rank, blocks in {
        2: [block(8 * MIB, frames=ACTIVATIONS)],
        0: [block(MIB), block(MIB, "inactive")],
    }.items():
        write(folder / f"rank{rank}.memory.pickle", {"segments": [segment(*blocks)]})
    write(folder / "rank10.memory.pickle", fragmented())
    return folder


def test_page_of_a_snapshot_is_the_golden_file(
    analyze: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    write(Path("snapshot.pickle"), fragmented())
    code, out, err = analyze("snapshot.pickle")
    assert (code, err) == (0, "")
    check_golden("memory.txt", out)


def test_page_of_ranks_is_the_golden_file(
    analyze: Any, capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(capture.parent)
    code, out, err = analyze(capture.name)
    assert (code, err) == (0, "")
    check_golden("memory_ranks.txt", out)


def test_capture_with_snapshots_is_found_by_its_id(analyze: Any, capture: Path) -> None:
    code, out, _ = analyze(capture.name, "--captures-dir", capture.parent, "--json")
    assert code == 0
    assert [rank["rank"] for rank in json.loads(out)["ranks"]] == [0, 2, 10]


def test_json_of_snapshots_has_the_sums(analyze: Any, capture: Path) -> None:
    _, out, _ = analyze(capture, "--json", "--with-text")
    document = json.loads(out)
    assert document.keys() == {"schema", "ranks", "failed", "text"}
    assert document["schema"] == "torchperfd.memory/1"
    assert document["failed"] == []
    assert "rank 10: " in document["text"]
    (device,) = document["ranks"][2]["devices"]
    assert device["reserved_bytes"] == 200 * MIB
    assert device["split_free_share"] == 0.4
    assert device["failed_allocation"] == {
        "bytes": 50 * MIB,
        "device_free_bytes": 3 * MIB,
        "time_us": 1_767_225_600_000_000,
        "user_frame": {"filename": "/home/ann/bert/model.py", "line": 42, "name": "forward"},
    }
    assert [advice["rule"] for advice in device["advice"]] == ["fragmentation", "one-stack"]
    assert device["stacks"][0]["frames"] == ACTIVATIONS
    assert device["classes"].keys() == {"small", "large"}


def test_snapshots_are_found_by_content_or_name(analyze: Any, tmp_path: Path) -> None:
    assert analyze(write(tmp_path / "anything", fragmented()))[0] == 0
    trace = tmp_path / "trace.pickle"
    trace.write_bytes((GOLDEN / "trace_small.json").read_bytes())
    assert "ProfilerStep*" in analyze(trace)[1]
    (tmp_path / "broken.pkl").write_bytes(b"?")
    code, out, err = analyze(tmp_path / "broken.pkl")
    assert (code, out) == (1, "")
    assert "broken.pkl: no memory snapshot; name a file of `torch.cuda.memory._dump_snapshot`" in err
    code, _, err = analyze(tmp_path / "none.pickle")
    assert (code, err.split(" at ")[0]) == (3, "torchperfd: there is no memory snapshot")


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_compressed_snapshot_is_read_as_the_plain_one(
    analyze: Any, tmp_path: Path, ending: str, compress: Any
) -> None:
    plain = write(tmp_path / "rank0.pickle", fragmented())
    document = json.loads(analyze(plain, "--json")[1])
    packed = tmp_path / "packed" / f"rank0.pickle.{ending}"
    packed.parent.mkdir()
    packed.write_bytes(compress(plain.read_bytes()))
    for path in (packed, packed.parent):
        code, out, _ = analyze(path, "--json")
        assert code == 0
        assert json.loads(out)["ranks"][0]["devices"] == document["ranks"][0]["devices"]
    packed.write_bytes(packed.read_bytes()[:-40])
    code, _, err = analyze(packed)
    assert code == 1
    assert "cut off" in err


def test_unreadable_rank_is_missing_and_named(analyze: Any, capture: Path) -> None:
    (capture / "rank2.memory.pickle").write_bytes(b"\x80\x04")
    code, out, err = analyze(capture)
    assert code == 5
    assert "rank 10: " in out
    assert err.startswith("torchperfd: 1 of 3 snapshots are missing: ")
    assert [rank["rank"] for rank in json.loads(analyze(capture, "--json")[1])["failed"]] == [2]


def test_traces_come_before_snapshots_beside_them(analyze: Any, capture: Path) -> None:
    (capture / "rank0.json").write_bytes((GOLDEN / "trace_small.json").read_bytes())
    code, out, err = analyze(capture)
    assert code == 0
    assert "ProfilerStep*" in out
    assert "left out 3 memory snapshots beside the traces" in err


def test_traces_and_snapshots_together_are_refused(analyze: Any, capture: Path) -> None:
    code, out, err = analyze(capture, GOLDEN / "trace_small.json")
    assert (code, out) == (2, "")
    assert "is a memory snapshot and" in err


@pytest.mark.parametrize(
    "options", [("--csv",), ("--markdown",), ("--html", "a.html"), ("--limit", "3"), ("--workers", "1")]
)
def test_options_of_traces_are_refused(analyze: Any, capture: Path, options: tuple[str, ...]) -> None:
    code, out, err = analyze(capture, *options)
    assert (code, out) == (2, "")
    assert err == f"torchperfd: {options[0]} is for traces, not for memory snapshots; leave it out\n"


def test_names_of_a_snapshot_cannot_drive_the_terminal(analyze: Any, tmp_path: Path) -> None:
    frame = {"filename": "/a/\x1b]0;b\x07.py", "line": 1, "name": "\u202e[bold]:smile:"}
    whole = {"segments": [segment(block(MIB, frames=[frame]))], "allocator_settings": {"a\x1b": "\x07"}}
    _, out, _ = analyze(write(tmp_path / "a.pickle", whole))
    assert "?]0;b?.py:1 in ?[bold]:smile:" in out
    assert "allocator settings: a?=?" in out
    assert "\x1b" not in out
