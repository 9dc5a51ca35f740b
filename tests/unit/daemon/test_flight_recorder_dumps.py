"""Flight Recorder dumps of dead jobs: reading them, the verdict, and ``torchperfd stacks --from``."""

import gzip
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Run

from torchperfd_cli import main
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.stacks.flight_recorder_dumps import is_dump, load, read_dumps


def entry(number: int, done: bool = True, **more: Any) -> dict[str, Any]:
    """Return one collective as torch writes it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_764_000_000_000_000_000,
        "input_sizes": [[1024, 4]],
        "output_sizes": [[1024, 4]],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/e/lib/python3.12/site-packages/torch/c10d.py", "line": 9},
            {"name": "average", "filename": "/job/train.py", "line": 40},
        ],
        **more,
    }


def dump(*entries: Any, ranks: str = "[0, 1, 2, 3]", **more: Any) -> dict[str, Any]:
    newest = max((each["collective_seq_id"] for each in entries), default=0)
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": newest, "last_started_collective": newest}},
        "entries": list(entries),
        **more,
    }


def waits(number: int, **more: Any) -> dict[str, Any]:
    """Return the dump of a rank that waits in a collective."""
    return dump(entry(number - 1), entry(number, done=False, **more))


@pytest.fixture
def stacks(run: Run, tmp_path: Path) -> Any:
    """Return a function that writes dumps by rank, and runs the command on their directory."""

    def write_and_run(dumps: dict[int, Any], *options: str, protocol: int = 2) -> tuple[int, str, str]:
        for rank, each in dumps.items():
            content = each if isinstance(each, bytes) else pickle.dumps(each, protocol)
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
        return run("stacks", "--from", tmp_path, *options)

    return write_and_run


@pytest.mark.parametrize(("late", "number"), [(2, 118), (0, 7), (3, 1)])
def test_rank_that_has_not_entered_is_named(stacks: Any, late: int, number: int) -> None:
    dumps = {rank: waits(number) for rank in range(4)}
    dumps[late] = dump(entry(number - 1)) if number > 1 else dump()
    code, out, err = stacks(dumps)
    others = {2: "0-1,3", 0: "1-3", 3: "0-2"}[late]
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == (
        f"rank {late} has not entered all_reduce number {number} of default_pg; ranks {others} wait in it"
    )
    assert (
        f"ranks {others} wait in all_reduce number {number} of default_pg since train.py:40 in average" in out
    )
    if number > 1:
        assert f"rank {late} entered all_reduce number {number - 1} of default_pg last, at train.py:40" in out


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dumps_of_any_protocol_are_read(stacks: Any, protocol: int) -> None:
    dumps = {0: waits(5), 1: dump(entry(4), ranks="[0, 1]")}
    assert stacks(dumps, protocol=protocol)[1].startswith("rank 1 has not entered all_reduce number 5")


def test_dump_as_torch_writes_it_is_read(tmp_path: Path) -> None:
    """torch's own pickler: texts in the memo by numbers of four bytes, long numbers, tuples without one."""

    def text(each: str, place: int) -> bytes:
        return b"X" + struct.pack("<I", len(each)) + each.encode() + b"r" + struct.pack("<I", place)

    words = ["version", "2.10", "entries", "process_group", "0", "default_pg", "collective_seq_id"]
    words += ["profiling_name", "nccl:barrier", "state", "scheduled", "input_sizes"]
    written = {word: text(word, place) for place, word in enumerate(words)}
    number = b"\x8a\x08" + struct.pack("<q", 9)
    first = (
        b"}(" + written["process_group"] + written["0"] + written["default_pg"] + b"\x86"
        + written["collective_seq_id"] + number + written["profiling_name"] + written["nccl:barrier"]
        + written["state"] + written["scheduled"] + written["input_sizes"] + b"](](K\x04K\x04eeu"
    )  # fmt: skip
    get = {word: b"h" + bytes([place]) for place, word in enumerate(words)}
    second = (
        b"}(" + get["process_group"] + get["0"] + get["default_pg"] + b"\x86" + get["collective_seq_id"]
        + b"K\x0a" + get["profiling_name"] + get["nccl:barrier"] + get["state"] + get["scheduled"]
        + get["input_sizes"] + b"]u"
    )  # fmt: skip
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(
        b"\x80\x02}("
        + written["version"]
        + written["2.10"]
        + written["entries"]
        + b"]("
        + first
        + second
        + b"eu."
    )
    assert is_dump(path)
    (group,) = load(path).groups
    assert (group.name, group.description) == ("0", "default_pg")
    assert [(call.number, call.name, call.sizes) for call in group.calls] == [
        (9, "barrier", "4x4"),
        (10, "barrier", ""),
    ]


def test_dumps_as_json_and_compressed_are_read(stacks: Any) -> None:
    """In torch's JSON the numbers of the status are texts."""
    late = dump(entry(4))
    late["pg_status"]["0"]["last_enqueued_collective"] = "4"
    dumps = {0: json.dumps(waits(5)).encode(), 1: gzip.compress(pickle.dumps(late)), 2: waits(5), 3: waits(5)}
    code, out, _ = stacks(dumps)
    assert code == 0
    assert out.startswith("rank 1 has not entered all_reduce number 5 of default_pg; ranks 0,2-3 wait in it")


def test_document_has_the_verdict(stacks: Any) -> None:
    code, out, _ = stacks({0: waits(5), 1: waits(5), 2: dump(entry(4)), 3: waits(5)}, "--json")
    document = json.loads(out)
    assert (code, document["schema"]) == (0, "torchperfd.flight-recorder/1")
    assert (document["odd"], document["absent"], document["failed"]) == ([2], [], [])
    (missed,) = document["missed"]
    assert (missed["number"], missed["call"], missed["absent"]) == (5, "all_reduce", [2])
    assert missed["places"] == [
        {"place": {"file": "/job/train.py", "line": 40, "function": "average"}, "ranks": [0, 1, 3]}
    ]
    assert document["ranks"][2]["last"]["number"] == 4


def test_numbers_from_zero_are_kept(stacks: Any) -> None:
    code, out, _ = stacks({0: dump(entry(0, done=False), ranks="[0, 1]"), 1: dump(ranks="[0, 1]")})
    assert out.startswith("rank 1 has not entered all_reduce number 0 of default_pg")
    assert code == 0


def test_missing_and_damaged_dumps_are_named(stacks: Any) -> None:
    code, out, err = stacks({0: waits(5), 1: dump(entry(4)), 3: pickle.dumps(waits(5))[:60]})
    assert code == 5
    assert out.startswith(
        "rank 1 has not entered all_reduce number 5 of default_pg; no readable dump of ranks 2-3; rank 0"
    )
    assert "not read: nccl_trace_rank_3: " in out
    assert "the file is cut off" in err
    assert "there is no dump of ranks 2-3" in err


def test_one_dump_names_where_it_waits(stacks: Any) -> None:
    code, out, _ = stacks({2: waits(5)})
    assert code == 5
    assert out.startswith(
        "rank 2 waits in all_reduce number 5 of default_pg; no readable dump of ranks 0-1,3, which may not"
    )


def test_collective_that_all_have_entered_blames_none(stacks: Any) -> None:
    code, out, _ = stacks({rank: waits(5) for rank in range(4)})
    assert code == 0
    assert out.startswith("ranks 0-3 wait in all_reduce number 5 of default_pg: every rank has entered it")


def test_different_sizes_and_calls_are_named(stacks: Any) -> None:
    dumps = {rank: waits(5) for rank in range(4)}
    _, out, _ = stacks({**dumps, 1: waits(5, input_sizes=[[8]])})
    assert "with different sizes: rank 1 with 8, the others with 1024x4" in out
    _, out, _ = stacks({**dumps, 0: waits(5, profiling_name="nccl:barrier")})
    assert out.startswith(
        "rank 0 calls barrier in place of all_reduce number 5 of default_pg; ranks 1-3 wait"
    )


def test_groups_of_one_name_are_told_apart(stacks: Any) -> None:
    """Two tensor-parallel groups that torch calls alike; rank 3 is missing in the second."""

    def of(rank: int, number: int, done: bool) -> Any:
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        one = entry(number, done, process_group=("mesh_tp", "undefined"))
        return {
            **dump(one),
            "pg_config": {"mesh_tp": {"name": "mesh_tp", "desc": "undefined", "ranks": ranks}},
        }

    code, out, _ = stacks({0: of(0, 9, True), 1: of(1, 9, True), 2: of(2, 4, False), 3: of(3, 3, True)})
    assert code == 0
    assert out.startswith(
        "rank 3 has not entered all_reduce number 4 of group mesh_tp, of rank 2; rank 2 waits"
    )


def test_messages_between_two_ranks_do_not_count(stacks: Any) -> None:
    between = entry(9, done=False, is_p2p=True, profiling_name="nccl:send 0->1")
    code, out, _ = stacks({0: dump(entry(4), between, ranks="[0]")})
    assert code == 0
    assert out.startswith("no rank waits in a collective")


def test_other_files_of_the_directory_are_left_out(stacks: Any, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("pg_config")
    (tmp_path / "rank0.json").write_text('{"schemaVersion": 1, "distributedInfo": {"pg_config": []}}')
    os.mkfifo(tmp_path / "nccl_trace_rank_9")
    assert stacks({0: waits(5), 1: dump(entry(4), ranks="[0, 1]")})[0] == 5


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.pg_config", id="code"),
        pytest.param(pickle.dumps({"pg_config": {}}), id="no-entries"),
        pytest.param(pickle.dumps({"entries": 3, "pg_config": 1}), id="entries-are-a-number"),
        pytest.param(b'{"pg_config": {}, "entries": [', id="json-cut-off"),
        pytest.param(b"", id="empty"),
    ],
)
def test_file_that_is_no_dump_is_our_error(tmp_path: Path, harm: bytes) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(harm)
    with pytest.raises(TorchperfdError, match="nccl_trace_rank_0"):
        read_dumps([path])


def test_strange_entries_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    strange = [
        None,
        {},
        {"process_group": ("0",)},
        entry(-1),
        entry(3, process_group=7),
        {**entry(2), "frames": 1},
    ]
    path.write_bytes(pickle.dumps(dump() | {"entries": strange, "pg_config": [], "pg_status": {"0": 1}}))
    read = load(path)
    assert read.skipped == 5
    assert [(call.number, call.place) for group in read.groups for call in group.calls] == [(2, None)]


def test_directory_without_dumps_and_live_options_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoSuchTargetError, match="holds no Flight Recorder dump"):
        read_dumps([tmp_path])
    assert main.run_command(["stacks", "--from", str(tmp_path), "--fleet"]) == 2
    assert "--fleet is for live runs, not for dumps" in capfd.readouterr().err
