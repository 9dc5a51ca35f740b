"""Reading memory snapshots: plain data only, whatever the release of torch, and never a foreign error."""

import collections
import gzip
import lzma
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.daemon.memory_snapshots import ACTIVATIONS, MIB, block, fragmented, segment, write

from torchperfd.document.terminal import render
from torchperfd_daemon import memory
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.memory.model import State
from torchperfd_daemon.untrusted_files import load_plain


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


class Plain:
    """An object of a class of the script."""


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("many", [1, 3000])
def test_plain_data_is_read_as_pickle_reads_it(protocol: int, many: int) -> None:
    """With so many that numbers of the memo are long, and that frames begin within tuples.

    Protocol 2 has no bytes: it has a function make them.
    """
    data = [
        {
            "numbers": [0, -1, 255, 65535, 1 << 31, -(1 << 62), 1 << 63, 0.5, None, True],
            "texts": ["", "a" * 300, f"é{each}", *([b"x", b"y" * 300] if protocol > 2 else [])],
            "tuples": [(), (each,), (0, 1 << 40), (1, 2, 3), (1, 2, 3, 4, 5)],
            "names": [("0", "default_pg"), (f"{each}",), ("a", "b", f"c{each}")] * 2,
            each: {"deeper": [{}]},
        }
        for each in range(many)
    ]
    assert load_plain(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "harm",
    [
        Runs(os.system, "touch executed"),
        Runs(eval, "open('executed', 'w')"),
        Plain(),
        os.system,
        collections.OrderedDict(a=1),
        Runs(getattr, "a", "b"),
    ],
    ids=["system", "eval", "object", "function", "ordered-dict", "getattr"],
)
def test_snapshot_with_code_is_refused_and_not_run(
    harm: object, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.pickle", {**fragmented(), "harm": harm}, protocol)
    with pytest.raises(TorchperfdError, match="contains code; torchperfd reads only plain data"):
        memory.load(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(b"\x80\x02cos\nsystem\n\x8c\x02ls\x85R.", id="global"),
        pytest.param(b"\x80\x02(\x8c\x02lsios\nsystem\n.", id="instance"),
        pytest.param(b"\x80\x02P1\n.", id="persistent-id"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension"),
        pytest.param(b"\x80\x02}}b.", id="build"),
        pytest.param(b"\x80\x04Nr\xff\xff\xff\x7f.", id="memo-of-32-GiB"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", id="bytearray-of-1-TiB"),
        pytest.param(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.", id="endless-text"),
        pytest.param(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63), id="text-beyond-all-files"),
        pytest.param(b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", id="endless-frame"),
        pytest.param(b"\x80\x04\x8b\xff\xff\xff\x7f.", id="long-number"),
        pytest.param(b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.", id="nested-key"),
        pytest.param(b"\x80\x04}K\x01\x85" + b"2\x86" * 100 + b"Ns.", id="key-in-key"),
        pytest.param(
            b"\x80\x02}X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86q\x00"
            + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
            + b"Ns.",
            id="tuple-of-tuples-by-numbers",
        ),
        pytest.param(
            b"\x80\x04}\x8c\x01a\x8c\x01b\x86\x94" + b"h\x00h\x00\x86\x94" * 60 + b"Ns.",
            id="tuple-of-tuples-by-memoize",
        ),
        pytest.param(
            b"\x80\x02}\x8c\x01a\x85(eq\x00" + b"h\x00h\x00\x86(eq\x00" * 60 + b"Ns.",
            id="tuple-put-into-the-memo-later",
        ),
        pytest.param(b"\x80\x02}\x8c\x01a]\x86Ns.", id="list-in-tuple"),
        pytest.param(b"\x80\x02}\x86Ns.", id="tuple-of-too-few"),
        pytest.param(b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", id="nested-lists"),
        pytest.param(b"\x80\x04\x8c\x01\xff.", id="no-utf-8"),
        pytest.param(b"\x80\x04}]Ns.", id="list-as-key"),
        pytest.param(b"\x80\x04K\x01K\x01a.", id="append-to-number"),
        pytest.param(b"\x80\x04h\x07.", id="unknown-memo"),
        pytest.param(b"\x80\x04a.", id="empty-stack"),
        pytest.param(b"\x80\x04.", id="nothing"),
        pytest.param(b"\x80\x09N.", id="future-protocol"),
        pytest.param(b"cos\nsystem\n(S'ls'\ntR.", id="text-protocol"),
        pytest.param(b'{"traceEvents": []}', id="trace"),
        pytest.param(b"", id="empty"),
        pytest.param(pickle.dumps({"a": 1}), id="no-segments"),
        pytest.param(pickle.dumps([1, 2]), id="list-of-numbers"),
        pytest.param(pickle.dumps({"segments": [{}]}), id="strange-segments"),
    ],
)
def test_file_that_is_no_snapshot_is_our_error(harm: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(harm)
    with pytest.raises(TorchperfdError, match=r"a\.pickle") as error:
        memory.load(path)
    assert error.value.remedy


def test_snapshot_that_refers_to_itself_ends(tmp_path: Path) -> None:
    """A list of 10,000 times the same segment with 10,000 times the same block would be 10**8 blocks."""
    same = segment(*[block(512)] * 10_000)
    path = write(tmp_path / "a.pickle", {"segments": [same] * 10_000})
    with pytest.raises(TorchperfdError, match="the same data again and again"):
        memory.load(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_snapshot_cut_off_is_named_so(kept: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.pickle", fragmented())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(TorchperfdError, match="is cut off; write it again"):
        memory.load(path)


def test_large_missing_or_special_file_is_our_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pickle", fragmented())
    with pytest.raises(TorchperfdError, match="more than 100 bytes"):
        memory.load(path, max_bytes=100)
    with pytest.raises(NoSuchTargetError, match="there is no memory snapshot at"):
        memory.load(tmp_path / "b.pickle")
    with pytest.raises(TorchperfdError, match="cannot read"):
        memory.load(tmp_path)
    with pytest.raises(TorchperfdError, match="no regular file"):
        memory.load(Path(os.devnull))


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compressed_snapshot_is_bounded_by_its_contents(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(compress(bytes(50_000_000)))
    assert path.stat().st_size < 100_000
    with pytest.raises(TorchperfdError, match="more than 1,000,000 bytes"):
        memory.load(path, max_bytes=1_000_000)


VALID = pickle.dumps(fragmented())


@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(lambda rest: b"\x80\x04" + rest),
        st.lists(st.sampled_from(b"()]}aeusNKhqrjt\x85\x86\x87\x88\x8c\x94.R\x93cb"), max_size=60).map(
            lambda rest: b"\x80\x04" + bytes(rest)
        ),
        st.tuples(st.integers(2, len(VALID) - 1), st.binary(max_size=4)).map(
            lambda change: VALID[: change[0]] + change[1] + VALID[change[0] + len(change[1]) :]
        ),
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_give_a_page_or_our_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    try:
        summary = memory.summarise(memory.load(path))
    except TorchperfdError:
        return
    assert render(memory.page_document([(None, summary)]))
    assert memory.to_dict(summary, 0)


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_frame_longer_than_the_file_is_damage(length: int) -> None:
    with pytest.raises(TorchperfdError, match="damaged"):
        load_plain(b"\x80\x04\x95" + struct.pack("<Q", length) + b"]" * 40 + b".")


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 7, 1 << 70, 0.5, float("nan"), "", "oom", "small", (), (0, 1), [], [None], {}, [[]]]
)
FIELDS = st.sampled_from(
    [*segment(), *block(0), "device_traces", "allocator_settings", "action", "history", "filename", "line"]
)
ENTRIES = st.dictionaries(FIELDS, JUNK, max_size=4)


@given(
    st.lists(st.dictionaries(FIELDS, st.one_of(JUNK, st.lists(ENTRIES, max_size=2)), max_size=5), max_size=3)
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_strange_fields_are_a_page_or_our_error(tmp_path: Path, segments: list[Any]) -> None:
    path = write(tmp_path / "a.pickle", {"segments": [segment(block(512)), *segments], **dict(*segments[:1])})
    try:
        summary = memory.summarise(memory.load(path))
    except TorchperfdError:
        return
    assert render(memory.page_document([(None, summary)]))
    assert memory.to_dict(summary, 0)


def test_old_snapshots_have_their_stack_in_a_history(tmp_path: Path) -> None:
    """The output of torch.cuda.memory_snapshot() of torch 1 and 2.0: a list, and blocks with a history."""
    old = {
        "size": 1024,
        "state": "active_pending_free",
        "history": [{"addr": 1, "real_size": 1000, "frames": ACTIVATIONS}],
    }
    path = write(
        tmp_path / "a.pickle", [{"total_size": 2 * MIB, "blocks": [old, block(2 * MIB - 1024, "inactive")]}]
    )
    (read,) = memory.load(path).segments
    assert (read.device, read.is_small, read.is_expandable, read.is_private) == (0, True, False, False)
    assert (read.blocks[0].size, read.blocks[0].requested) == (1024, 1000)
    assert read.blocks[0].state is State.AWAITING_FREE
    assert [frame.line for frame in read.blocks[0].stack] == [0, 125, 42, 17]


def test_segment_without_blocks_counts_by_its_totals(tmp_path: Path) -> None:
    bare = [
        {"total_size": 20 * MIB, "allocated_size": 4 * MIB, "active_size": 5 * MIB},
        {"total_size": 30 * MIB},
    ]
    (device,) = memory.summarise(memory.load(write(tmp_path / "a.pickle", {"segments": bare}))).devices
    sums = device.sums
    assert (sums.reserved, sums.allocated, sums.active) == (50 * MIB, 4 * MIB, 5 * MIB)
    assert (sums.split_free, sums.largest_free) == (15 * MIB, 30 * MIB)


def test_entries_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    whole = fragmented()
    whole["segments"] += [None, {"stream": 0}]
    whole["segments"][0]["blocks"] += [{"size": -1, "state": "inactive"}, {"size": 1, "state": "new"}, 7]
    whole["device_traces"][0] += ["?", {"action": "oom"}]
    snapshot = memory.load(write(tmp_path / "a.pickle", whole))
    assert snapshot.skipped == 7
    assert len(snapshot.segments) == 3
    assert [failure.size for failure in snapshot.failures] == [MIB, 50 * MIB]


def test_settings_are_those_that_differ_from_torchs(tmp_path: Path) -> None:
    assert memory.load(write(tmp_path / "a.pickle", fragmented())).settings == {
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
        "garbage_collection_threshold": "0.8",
        "roundup_power2_divisions": "2:4",
    }
