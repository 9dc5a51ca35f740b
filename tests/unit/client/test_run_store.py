"""The directory of kept runs: private, whole files, no more than fits, and found by a prefix."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.run_documents import run_file

from torchperfd.runs.store import RunStore, file_id, read_file
from torchperfd.runs.values import NoSuchRunError, RunFileError
from torchperfd.v1 import access


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
