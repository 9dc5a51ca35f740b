"""``torchperfd captures``: what it lists, copies and deletes."""

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchperfd_daemon import cli
from torchperfd_daemon.captures import CaptureRecord, CaptureState, Catalog, RankTrace

Captures = Callable[..., tuple[int, str, str]]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "captures")


@pytest.fixture
def captures(catalog: Catalog, capfd: pytest.CaptureFixture[str]) -> Captures:
    """Run the command; return exit code, stdout and stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli._run(["captures", "--captures-dir", str(catalog.directory), *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def add(catalog: Catalog, capture_id: str, requested_at: float = 1_700_000_000.0, **more: object) -> Path:
    folder = catalog.create(capture_id)
    values = {
        "run": "bert-17",
        "trigger": "command",
        "state": CaptureState.COMPLETE,
        "step_range": (120, 125),
        "ranks": [
            RankTrace(rank, CaptureState.COMPLETE, "", f"rank{rank}.json", 1_500_000, "ab") for rank in (0, 1)
        ],
    }
    catalog.save(CaptureRecord(capture_id=capture_id, requested_at=requested_at, **{**values, **more}))  # type: ignore[arg-type]
    (folder / "rank0.json").write_text("{}")
    return folder


def test_the_list_is_a_table_newest_first(captures: Captures, catalog: Catalog, utc: None) -> None:
    add(catalog, "20231114-221320-aaaaaa")
    add(
        catalog,
        "20231114-231320-bbbbbb",
        1_700_003_600.0,
        run="r" * 40,
        state=CaptureState.FAILED,
        step_range=None,
        ranks=[RankTrace(0, CaptureState.FAILED, "gone")],
    )
    code, out, err = captures("list")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["CAPTURE", "RUN", "STATE", "STEPS", "RANKS", "SIZE", "WHEN"],
        ["20231114-231320-bbbbbb", "r" * 28, "failed", "-", "1", "0.0", "MB", "2023-11-14", "23:13:20"],
        [
            *("20231114-221320-aaaaaa", "bert-17", "complete", "120-124", "2", "3.0", "MB"),
            *("2023-11-14", "22:13:20"),
        ],
    ]


def test_the_list_as_json(captures: Captures, catalog: Catalog) -> None:
    add(catalog, "one")
    code, out, err = captures("list", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document.keys() == {"schema", "directory", "captures"}
    assert document["schema"] == "torchperfd.captures/1"
    assert document["directory"] == str(catalog.directory)
    [entry] = document["captures"]
    assert (entry["capture_id"], entry["state"], entry["step_range"]) == ("one", "complete", [120, 125])
    assert [rank["file"] for rank in entry["ranks"]] == ["rank0.json", "rank1.json"]


def test_an_empty_list_is_said_on_stderr(captures: Captures, catalog: Catalog) -> None:
    assert captures("list") == (0, "", f"no captures in {catalog.directory}\n")
    assert json.loads(captures("list", "--json")[1])["captures"] == []


def test_a_runs_name_cannot_drive_the_terminal(captures: Captures, catalog: Catalog) -> None:
    add(catalog, "one", run="\x1b]0;owned\x07\n")
    code, out, _ = captures("list")
    assert code == 0
    assert "\x1b" not in out
    assert "?]0;owned??" in out
    assert out.count("\n") == 2


def test_get_copies_and_says_where(captures: Captures, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    target = tmp_path / "new" / "place"
    assert captures("get", "one", "--output", target) == (0, f"{target / 'one'}\n", "")
    assert {path.name for path in (target / "one").iterdir()} == {"manifest.json", "rank0.json"}
    assert (target / "one" / "rank0.json").read_text() == "{}"


def test_get_copies_into_the_current_directory(
    captures: Captures, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "one")
    monkeypatch.chdir(tmp_path)
    assert captures("get", "one") == (0, "one\n", "")
    assert (tmp_path / "one" / "rank0.json").exists()


def test_get_brings_neither_open_permissions_nor_what_others_planted(
    captures: Captures, catalog: Catalog, tmp_path: Path
) -> None:
    folder = add(catalog, "one")
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (folder / "rank1.json").symlink_to(secret)
    (folder / ".rank2.json.part").write_text("unfinished")
    os.mkfifo(folder / "rank3.json")
    assert captures("get", "one", "-o", tmp_path / "out")[0] == 0
    copy = tmp_path / "out" / "one"
    assert {path.name for path in copy.iterdir()} == {"manifest.json", "rank0.json"}
    assert not stat.S_IMODE(copy.stat().st_mode) & (stat.S_IWOTH | stat.S_ISVTX)


def test_get_never_overwrites(captures: Captures, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    (tmp_path / "one").mkdir()
    assert captures("get", "one", "-o", tmp_path) == (
        1,
        "",
        f"torchperfd: {tmp_path / 'one'} exists; choose another directory with --output\n",
    )
    assert list((tmp_path / "one").iterdir()) == []


def test_get_says_why_it_cannot_copy(captures: Captures, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    (tmp_path / "file").write_text("")
    code, out, err = captures("get", "one", "-o", tmp_path / "file" / "below")
    assert (code, out) == (1, "")
    assert err.startswith(f"torchperfd: cannot copy to {tmp_path / 'file' / 'below' / 'one'}: ")
    assert err.count("\n") == 1


def test_rm_deletes(captures: Captures, catalog: Catalog) -> None:
    for capture_id in ("one", "two", "three"):
        add(catalog, capture_id)
    assert captures("rm", "one", "two") == (0, "", "deleted one\ndeleted two\n")
    assert [record.capture_id for record in catalog.list()] == ["three"]


@pytest.mark.parametrize("verb", ["get", "rm"])
def test_a_capture_that_is_not_there_is_named(captures: Captures, catalog: Catalog, verb: str) -> None:
    assert captures(verb, "nope") == (
        3,
        "",
        f"torchperfd: no capture nope in {catalog.directory}; list them with `torchperfd captures list`\n",
    )
    assert captures(verb, "../../etc") == (
        3,
        "",
        "torchperfd: '../../etc' is no capture id; list them with `torchperfd captures list`\n",
    )


def test_the_directory_comes_from_the_environment(
    catalog: Catalog, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(catalog.directory))
    assert cli._run(["captures", "list"]) == 0
    assert str(catalog.directory) in capfd.readouterr().err
    monkeypatch.delenv("TORCHPERFD_CAPTURES_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(catalog.directory.parent / "state"))
    assert cli._run(["captures", "list"]) == 0
    assert f"{catalog.directory.parent}/state/torchperfd/captures" in capfd.readouterr().err
