"""Reading a trace file: exact times, and everything that real files do wrong."""

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchperfd.document.terminal import render
from torchperfd_daemon import analysis
from torchperfd_daemon.analysis import kineto, trace_files
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

SMALL = Path(__file__).parents[2] / "golden" / "trace_small.json"
# Traces count from at most three months back: 2^43 µs is 101 days.
LONGEST_NS = (1 << 43) * 1000 - 1


def event(name: Any = "aten::add", **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 10.0, "dur": 2.5} | fields


def write(path: Path, *events: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def names(trace: analysis.Trace) -> list[str]:
    return [trace.names[number] for number in trace.name]


def load_or_refusal(file: Path) -> analysis.Trace | str:
    try:
        return analysis.load(file)
    except TorchperfdError as error:
        return str(error)


# The second range is where a double is coarsest and still used; the third, where decimals are.
@given(
    st.integers(0, LONGEST_NS)
    | st.integers((1 << 42) * 1000, LONGEST_NS)
    | st.integers(LONGEST_NS, (1 << 53) * 999)
)
@example(1_695_835_142_000_123_456)
def test_every_nanosecond_of_a_trace_survives_its_three_decimals(
    tmp_path_factory: pytest.TempPathFactory, ns: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "t.json"
    for quote in ("", '"'):
        file.write_text(
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", '
            f'"ts": {quote}{ns // 1000}.{ns % 1000:03}{quote}, "dur": {quote}0.003{quote}}}]}}'
        )
        trace = analysis.load(file)
        assert (trace.origin_ns, trace.start[0], trace.end[0]) == (ns, 0, 3)


def test_a_clock_may_run_over_what_a_double_can_hold(tmp_path: Path) -> None:
    before, after = "8796093022206.999", "8796093022210.001"
    file = tmp_path / "t.json"
    file.write_text(
        '{"traceEvents": ['
        + ",".join(
            f'{{"ph": "X", "cat": "cpu_op", "name": "a", "ts": {ts}, "dur": 1}}' for ts in (before, after)
        )
        + "]}"
    )
    assert list(analysis.load(file).start) == [0, 3002]


def test_columns_start_at_zero_and_hold_integer_nanoseconds(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.json",
        event(ts=4373220640386.904, dur=0.003, args={"External id": 7}),
        event("later", ts=4373220640387.005, dur=1, cat="Operator", tid="main", args={"External id": "8"}),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    )
    trace = analysis.load(file)
    assert list(trace.start) == [0, 101]
    assert list(trace.end) == [3, 1101]
    assert names(trace) == ["aten::add", "later"]
    assert [trace.categories[number] for number in trace.category] == ["cpu_op", "cpu_op"]
    assert [trace.threads[number] for number in trace.thread] == [(1, 1), (1, "main")]
    assert list(trace.external) == [7, 8]
    assert (trace.events, trace.skipped, trace.damaged) == (3, 0, False)
    assert trace.size == file.stat().st_size
    assert trace.duration_ns == 1101


@pytest.mark.parametrize(
    "broken",
    [
        {"ph": "X"},
        {"name": "no phase"},
        event(ts="soon"),
        event(ts=None),
        event(dur=-1),
        event(ts=-9e15),
        event(ts=1e300),
        event(dur=1e18),
        event(dur=None),
        {"ph": "X", "cat": "cpu_op", "name": "endless", "ts": 1.0},
        "text",
        None,
        17,
        [],
    ],
)
def test_a_bad_event_costs_only_itself(tmp_path: Path, broken: Any) -> None:
    trace = analysis.load(write(tmp_path / "t.json", event("first"), broken, event("last")))
    assert names(trace) == ["first", "last"]
    assert (trace.events, trace.skipped, trace.damaged) == (2, 1, False)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (event(name=3), "3"),
        (event(name=""), "(no name)"),
        (event(name=None), "(no name)"),
        (event("\ud800"), "?"),
        (event("odd", cat=[]), "odd"),
        (event("odd", cat=""), "odd"),
        (event("odd", tid=None), "odd"),
        (event("odd", pid=[1]), "odd"),
        (event("odd", args=[1]), "odd"),
        (event("odd", args={"External id": 1.5}), "odd"),
        (event("odd", args={"Fwd thread id": "x", "Sequence number": {}}), "odd"),
        (event("odd", ts="10,0", dur="2,5"), "odd"),
        (event("odd", ts="10.0", dur="2.5"), "odd"),
    ],
)
def test_load_bad_field_keeps_the_events_time(tmp_path: Path, bad: Any, named: str) -> None:
    trace = analysis.load(write(tmp_path / "t.json", event("first"), bad, event("last")))
    assert names(trace) == ["first", named, "last"]
    assert list(trace.start) == [0, 0, 0]
    assert list(trace.end) == [2500, 2500, 2500]
    assert (trace.events, trace.skipped, trace.damaged) == (3, 0, False)


@pytest.mark.parametrize(
    "broken",
    [
        '{"ph": "X", "name": "a "quoted" name", "cat": "cpu_op", "ts": 1.0, "dur": 1.0}',
        '{"ph": "X", "name": "a" "cat": "cpu_op"}',
        '{"ph": "X", "name": "a", "args": {"deep": ' + "[" * 100_000 + "}}",
    ],
)
def test_unparsable_parts_cost_only_their_event(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(
        f'{{"deviceProperties": [{{"id": 0}}], "traceEvents": [{json.dumps(event("first"))},\n  {broken}  ,\n'
        f'{json.dumps(event("last", args={"External id": 3, "names": ["[{", "}"]}))}\n],"traceName": "t"}}'
    )
    trace = analysis.load(file)
    assert names(trace) == ["first", "last"]
    assert list(trace.external) == [0, 3]
    assert trace.skipped == 1
    assert trace.damaged
    begin = file.read_text().index(broken)
    assert trace.reading.damaged_at is not None
    assert begin <= trace.reading.damaged_at <= begin + len(broken)


@pytest.mark.parametrize("odd", [b"\xff", b"\x01", b"\x0b", b"\xc0\xff"])
def test_load_odd_byte_in_a_name_keeps_the_event(tmp_path: Path, odd: bytes) -> None:
    file = tmp_path / "t.json"
    whole = json.dumps({"traceEvents": [event("first"), event("b@d"), event("last")]}).encode()
    file.write_bytes(whole.replace(b"@", odd))
    trace = analysis.load(file)
    first, named, last = names(trace)
    assert (first, named[0], named[-1], last) == ("first", "b", "d", "last")
    assert (trace.skipped, trace.damaged, trace.reading.repaired) == (0, False, 1)


@pytest.mark.parametrize(
    "argument",
    ["inf", "-inf", "nan", "NaN", "Infinity", "-nan(ind)", "1.#INF", "7,757576", "-0,5"],
)
def test_load_odd_number_in_args_keeps_the_event(tmp_path: Path, argument: str) -> None:
    """Numbers that are none, and decimal commas, as C's printf writes them in some locales."""
    file = tmp_path / "t.json"
    odd = (
        '{"ph": "X", "cat": "kernel", "name": "odd", "pid": 0, "tid": 7, "ts": 20, "dur": 10, "args": '
        f'{{"correlation": 5, "number": {argument}, "last": [2, 1], "stream": 7}}}}'
    )
    file.write_text(f'{{"traceEvents": [{json.dumps(event("first"))}, {odd}, {json.dumps(event("last"))}]}}')
    trace = analysis.load(file)
    assert names(trace) == ["first", "odd", "last"]
    assert (trace.end[1] - trace.start[1], trace.correlation[1]) == (10_000, 5)
    assert (trace.skipped, trace.damaged, trace.reading.repaired) == (0, False, 1)


@pytest.mark.parametrize("time", ["nan", "inf", "NaN", '"inf"', '"soon"', "true", "{}"])
def test_load_time_that_is_no_number_costs_the_event(tmp_path: Path, time: str) -> None:
    file = tmp_path / "t.json"
    odd = f'{{"ph": "X", "name": "a", "cat": "cpu_op", "ts": {time}, "dur": 1.0}}'
    file.write_text(f'{{"traceEvents": [{json.dumps(event("first"))}, {odd}, {json.dumps(event("last"))}]}}')
    trace = analysis.load(file)
    assert names(trace) == ["first", "last"]
    assert trace.skipped == sum(trace.reading.skipped_why.values()) == 1


def test_trace_cut_at_any_byte_is_read_to_the_cut_or_refused(tmp_path: Path) -> None:
    whole = SMALL.read_bytes()
    file = tmp_path / "t.json"
    most = 0
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        trace = load_or_refusal(file)
        if isinstance(trace, str):
            assert most == 0, "a longer file never says less"
            assert "\n" not in trace
        else:
            assert len(trace) >= most
            if len(trace) > most:
                analysis.to_dict(analysis.summarise(trace), None)
            most = len(trace)
    assert most == len(analysis.load(SMALL))


def test_gzip_cut_at_any_byte_is_read_to_the_cut_or_refused(tmp_path: Path) -> None:
    whole = gzip.compress(SMALL.read_bytes())
    file = tmp_path / "t.json.gz"
    said: list[str] = []
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        trace = load_or_refusal(file)
        if isinstance(trace, str):
            assert said == []
            assert "\n" not in trace
        else:
            assert trace.damaged
            # The compressed text ends anywhere in an event.
            assert 0 < (trace.reading.damaged_at or 0) <= len(SMALL.read_bytes())
            said = names(trace)
    assert said == names(analysis.load(SMALL))


@given(st.lists(st.tuples(st.integers(0, 8151), st.binary(min_size=1, max_size=8)), min_size=1, max_size=5))
def test_overwritten_bytes_cost_events_and_never_more(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    contents = bytearray(SMALL.read_bytes())
    for at, content in damage:
        contents[at : at + len(content)] = content
    file = tmp_path_factory.mktemp("damaged") / "t.json"
    file.write_bytes(contents)
    trace = load_or_refusal(file)
    if isinstance(trace, analysis.Trace):
        render(analysis.summary_document(analysis.summarise(trace), 0))


def test_gzip_is_detected_by_content_with_several_members(tmp_path: Path) -> None:
    whole = SMALL.read_bytes()
    file = tmp_path / "named-plainly.json"
    file.write_bytes(gzip.compress(whole[:3000]) + gzip.compress(whole[3000:]))
    trace = analysis.load(file)
    assert names(trace) == names(analysis.load(SMALL))
    assert not trace.damaged


def test_a_corrupted_gzip_file_gives_what_came_before_the_damage(tmp_path: Path) -> None:
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(SMALL.read_bytes())[:-8] + b"checksum")
    trace = analysis.load(file)
    assert trace.damaged
    assert names(trace) == names(analysis.load(SMALL))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_file_beyond_the_cap_is_refused(tmp_path: Path, compress: Any) -> None:
    file = tmp_path / "t.json.gz"
    file.write_bytes(compress(b" " * 3_000_000))
    with pytest.raises(TorchperfdError, match="holds more than 2,000,000 bytes"):
        analysis.load(file, max_bytes=2_000_000)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello", "not a PyTorch trace"),
        (b"[]", "not a PyTorch trace"),
        (b"{}", "not a PyTorch trace"),
        (b'{"traceEvents": 3}', "not a PyTorch trace"),
        (b'{"traceEvents": []}', "no event with a duration"),
        (b'{"traceEvents": [{"ph": "M"}]}', "no event with a duration"),
        (b"[" * 100_000, "not a PyTorch trace"),
        (b"\x1f\x8b\x08", "not a PyTorch trace"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "t.json"
    file.write_bytes(content)
    with pytest.raises(TorchperfdError, match=said) as caught:
        analysis.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_metadata_is_read_before_and_after_the_events(tmp_path: Path) -> None:
    around = {"baseTimeNanoseconds": 1_000, "distributedInfo": {"rank": 3, "world_size": 8}}
    file = tmp_path / "t.json"
    for text in (
        json.dumps(around | {"traceEvents": [event(ts=5.0)]}),
        json.dumps({"traceEvents": [event(ts=5.0)]} | around),
        json.dumps({"traceEvents": [event(ts=5.0)], "others": [event(), event()]} | around, indent=1),
    ):
        file.write_text(text)
        trace = analysis.load(file)
        assert (trace.rank, trace.world_size, trace.origin_ns) == (3, 8, 6_000)
        assert (len(trace), trace.skipped, trace.damaged) == (1, 0, False)


@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
def test_where_the_text_is_cut_into_pieces_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    whole = analysis.load(SMALL)
    monkeypatch.setattr(trace_files, "_PIECE", piece)
    monkeypatch.setattr(kineto, "_TAIL", 300)
    pieces = analysis.load(SMALL)
    assert names(pieces) == names(whole)
    assert list(pieces.start) == list(whole.start)
    assert (pieces.events, pieces.skipped, pieces.damaged) == (whole.events, whole.skipped, whole.damaged)
    assert pieces.reading.damaged_at == whole.reading.damaged_at


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_memory_holds_a_batch_and_never_the_text(tmp_path: Path, compress: Any) -> None:
    """A bomb: many times the file in memory, were it ever read as a whole."""
    file = tmp_path / "t.json"
    one = json.dumps(event(args={"Input Dims": [[1, 2]], "note": "x" * 4000})).encode()
    file.write_bytes(compress(b'{"traceEvents": [' + b",".join([one] * 10_000) + b"]}"))
    tracemalloc.start()
    try:
        trace = analysis.load(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace) == 10_000
    assert peak < 12_000_000


def test_one_event_without_end_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    first, last = json.dumps(event("first")), json.dumps(event("last"))
    endless = '{"ph": "X", "name": "' + "x" * 3_000_000
    file.write_text(f'{{"traceEvents": [{first}, {endless}, {last}]}}')
    trace = analysis.load(file)
    assert names(trace) == ["first", "last"]
    assert (trace.skipped, trace.damaged) == (1, True)


def test_every_quote_left_unescaped_costs_its_event_and_no_other(tmp_path: Path) -> None:
    whole = SMALL.read_text()
    before = len(analysis.load(SMALL))
    file = tmp_path / "t.json"
    for at in [match.end() for match in re.finditer('"name": "', whole)][::3]:
        file.write_text(whole[: at + 1] + '"' + whole[at + 1 :])
        trace = analysis.load(file)
        assert before - 1 <= len(trace) <= before
        analysis.to_dict(analysis.summarise(trace), None)


def test_missing_file_and_directory_have_distinct_errors(tmp_path: Path) -> None:
    with pytest.raises(NoSuchTargetError):
        analysis.load(tmp_path / "none.json")
    with pytest.raises(TorchperfdError, match="Is a directory"):
        analysis.load(tmp_path)
