"""Reports of runs, read again: as written, from older versions, and damaged in any way."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.run_documents import PREDICTED, kept_run, run_file

from torchperfd.runs.promise import CHANGED, PromiseOutcome
from torchperfd.runs.record import RunRecord, read_record
from torchperfd.runs.values import RunFileError
from torchperfd_cli.commands._run_overview import read_overview

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def read(document: Any) -> RunRecord:
    return read_record(json.dumps(document).encode(), "run.json")


def test_record_has_what_the_report_has() -> None:
    record = read(run_file("train-1", steps=20, seconds={"forward": 0.03, "data": 0.01}))
    assert (record.run, record.script, record.host, record.world_size) == ("train-1", "train.py", "node-1", 1)
    assert (record.steps, record.exit_state, record.cause) == (20, "finished", "input_bound")
    assert record.environment["torch"] == "2.13.0"
    (rank,) = record.ranks
    assert rank.step_seconds == pytest.approx(0.04)
    assert rank.phase_seconds == pytest.approx({"forward": 0.03, "data": 0.01})
    assert rank.blocks is not None
    assert len(rank.blocks.step) == 19


def test_record_of_an_older_version_has_no_blocks() -> None:
    document = run_file("train-1", steps=20, seconds={"forward": 0.03})
    older = {name: document[name] for name in ("schema", "run", "ranks", "verdict")}
    del older["ranks"][0]["blocks"]
    record = read(older)
    assert (record.script, record.started, record.world_size) == ("", None, 1)
    assert record.ranks[0].blocks is None


def test_record_text_cannot_drive_a_terminal() -> None:
    document = run_file("train\x1b[2J\u202e", steps=3, seconds={"forward\n": 0.03})
    record = read(document)
    assert record.run == "train?[2J?"
    assert list(record.ranks[0].phase_seconds) == ["forward?"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"schema": "torchperfd.report/1"}', b"[" * 99999]
)
def test_record_of_something_else_is_a_clear_error(content: bytes) -> None:
    with pytest.raises(RunFileError, match=r"run\.json is no report of a run.*--report FILE"):
        read_record(content, "run.json")


WHOLE = kept_run({"forward": 0.03}, run="train-1", steps=4, verdict=PREDICTED) | {
    "promise": PromiseOutcome("train-0", CHANGED, promised_ratio=-0.5, before_seconds=0.1).to_dict()
}
"""A report with all that a run may keep of itself and of an earlier one."""


@settings(max_examples=60)
@given(st.data())
def test_record_of_any_damage_is_read_or_an_error(data: st.DataObject) -> None:
    """One value anywhere is replaced by another, or removed."""
    document: Any = copy.deepcopy(WHOLE)
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    if data.draw(st.booleans()):
        place[key] = data.draw(JSON)
    else:
        del place[key]
    _read_or_refuse(json.dumps(document).encode())


@given(st.integers(0, 3000), st.binary(max_size=4))
def test_record_cut_or_overwritten_is_read_or_an_error(position: int, other: bytes) -> None:
    whole = json.dumps(WHOLE).encode()
    _read_or_refuse(whole[:position])
    _read_or_refuse(whole[:position] + other + whole[position + len(other) :])


def _read_or_refuse(content: bytes) -> None:
    message = ""
    try:
        overview = read_overview(content, "run.json")
        run = overview.record.run
        assert overview.record == read_record(content, "run.json")
        assert overview.to_text().replace("\n", "").isprintable()
        json.dumps(overview.to_page(), allow_nan=False)
    except RunFileError as error:
        run, message = "", str(error)
    assert (run + message).isprintable()
    assert not message or "run.json" in message
