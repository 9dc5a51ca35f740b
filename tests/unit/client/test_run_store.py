"""Kept runs: the directory, and reading a record."""

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.run_documents import PREDICTED, kept_run, run_file

from torchperfd.document.terminal import render
from torchperfd.report.promise import CHANGED, PromiseOutcome
from torchperfd.report.record import NoSuchRunError, RunFileError, RunRecord, read_record
from torchperfd.report.store import RunStore, file_id, read_file
from torchperfd.v1 import access
from torchperfd_cli.commands._run_overview import read_overview


def document(run: str) -> dict[str, Any]:
    return run_file(run, steps=10, seconds={"forward": 0.01})


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(str(tmp_path / "state/runs"))


def test_store_keeps_a_run_for_this_user_alone(store: RunStore) -> None:
    assert store.keep(document("train-1")) == "train-1"
    folder = Path(store.directory)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()] == [0o600]
    assert store.read("train-1").run == "train-1"


def test_store_same_name_again_replaces_nothing(store: RunStore) -> None:
    assert [store.keep(document("bert")) for _ in range(3)] == ["bert", "bert.2", "bert.3"]
    assert len(store.list()) == 3


def test_store_without_hard_links_keeps_runs(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert store.keep(document("train-1")) == "train-1"
    assert store.read("train-1").run == "train-1"


def test_store_prefix_finds_the_only_run(store: RunStore) -> None:
    for run in ("train-3f2a", "train-3f9b", "eval-11"):
        store.keep(document(run))
    assert store.whole_id("e") == "eval-11"
    assert store.whole_id("train-3f2a") == "train-3f2a"
    with pytest.raises(NoSuchRunError, match=r"2 runs begin with train-3f: train-3f2a, train-3f9b"):
        store.whole_id("train-3f")
    with pytest.raises(NoSuchRunError, match="no kept run x; `torchperfd runs` lists them"):
        store.whole_id("x")
    with pytest.raises(NoSuchRunError):
        store.whole_id("")


def test_store_whole_name_wins_over_longer_ones(store: RunStore) -> None:
    store.keep(document("bert"))
    store.keep(document("bert"))
    assert store.whole_id("bert") == "bert"


@pytest.mark.parametrize(("most_bytes", "most_runs"), [(2500, 100), (10**9, 2)])
def test_store_too_much_removes_the_oldest(tmp_path: Path, most_bytes: int, most_runs: int) -> None:
    store = RunStore(str(tmp_path / "runs"), most_bytes, most_runs)
    for number in range(5):
        run_id = store.keep(document(f"train-{number}"))
        os.utime(Path(store.directory, f"{run_id}.json"), (1000 + number, 1000 + number))
    sizes = [each.bytes for each in store.list()]
    assert 800 < sizes[0] < 1250
    assert [each.run_id for each in store.list()] == ["train-4", "train-3"]


def test_store_newest_is_kept_whatever_its_size(tmp_path: Path) -> None:
    store = RunStore(str(tmp_path / "runs"), most_bytes=1)
    store.keep(document("train-1"))
    assert [each.run_id for each in store.list()] == ["train-1"]


def test_store_unfinished_file_is_removed_after_an_hour(store: RunStore) -> None:
    store.keep(document("train-1"))
    old, new = (Path(store.directory, name) for name in (".a.part", ".b.part"))
    for part in (old, new):
        part.touch()
    os.utime(old, (1, 1))
    store.keep(document("train-2"))
    assert (old.exists(), new.exists()) == (False, True)
    assert [each.run_id for each in store.list()] != []


def test_store_failed_write_leaves_no_file(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep(document("train-1"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        store.keep(document("train-2"))
    assert [file.name for file in Path(store.directory).iterdir()] == ["train-1.json"]


def test_store_directory_of_all_users_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(access.UntrustedError):
        RunStore(str(folder)).keep(document("train-1"))


def test_store_link_in_place_of_a_report_is_not_followed(store: RunStore, tmp_path: Path) -> None:
    store.keep(document("train-1"))
    Path(store.directory, "other.json").symlink_to(tmp_path / "elsewhere")
    assert [each.run_id for each in store.list()] == ["train-1"]
    with pytest.raises(RunFileError):
        store.read("other")


def test_store_missing_directory_has_no_runs(store: RunStore) -> None:
    assert store.list() == []
    with pytest.raises(NoSuchRunError):
        store.remove("train-1")


@given(st.text(max_size=300))
def test_file_id_of_any_name_is_one_visible_file(run: str) -> None:
    name = file_id(run)
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith((".", "-"))
    assert 0 < len(name) <= 121


def test_read_file_of_no_regular_file_is_a_clear_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(RunFileError):
            read_file(str(tmp_path / name))


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
    assert (record.steps, record.ending.state, record.cause) == (20, "finished", "input_bound")
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
        assert render(overview.document()).replace("\n", "").isprintable()
        json.dumps(overview.to_page(), allow_nan=False)
    except RunFileError as error:
        run, message = "", str(error)
    assert (run + message).isprintable()
    assert not message or "run.json" in message
