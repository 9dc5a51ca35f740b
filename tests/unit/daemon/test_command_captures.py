"""``torchperfd captures``: what it lists, copies and deletes."""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import Run, runner

from torchperfd_cli import main
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import write_upload_marker
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, RankTrace


@pytest.fixture
def captures(catalog: Catalog, capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd, "captures", "--captures-dir", str(catalog.directory))


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


def test_the_list_is_a_table_newest_first(captures: Run, catalog: Catalog, utc: None) -> None:
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
        ["20231114-231320-bbbbbb", "r" * 40, "failed", "-", "1", "0.0", "MB", "2023-11-14", "23:13:20"],
        [
            *("20231114-221320-aaaaaa", "bert-17", "complete", "120-124", "2", "3.0", "MB"),
            *("2023-11-14", "22:13:20"),
        ],
    ]


def test_captures_alone_lists_them(captures: Run, catalog: Catalog, utc: None) -> None:
    add(catalog, "one")
    assert captures() == captures("list")
    assert "one" in captures()[1]


def test_the_list_as_json(captures: Run, catalog: Catalog) -> None:
    add(catalog, "one")
    code, out, err = captures("list", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document.keys() == {"schema", "directory", "total", "captures"}
    assert document["schema"] == "torchperfd.captures/1"
    assert document["directory"] == str(catalog.directory)
    assert document["total"] == 1
    [entry] = document["captures"]
    assert entry["pinned"] is False
    assert entry["disk_bytes"] > 0
    assert (entry["capture_id"], entry["state"], entry["step_range"]) == ("one", "complete", [120, 125])
    assert [rank["file"] for rank in entry["ranks"]] == ["rank0.json", "rank1.json"]


def test_an_empty_list_is_said_on_stderr(captures: Run, catalog: Catalog) -> None:
    assert captures("list") == (0, "", f"no captures in {catalog.directory}\n")
    assert json.loads(captures("list", "--json")[1])["captures"] == []


def test_a_runs_name_cannot_drive_the_terminal(captures: Run, catalog: Catalog) -> None:
    add(catalog, "one", run="\x1b]0;owned\x07\n")
    code, out, _ = captures("list")
    assert code == 0
    assert "\x1b" not in out
    assert "?]0;owned??" in out
    assert out.count("\n") == 2


def test_get_copies_and_says_where(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    target = tmp_path / "new" / "place"
    assert captures("get", "one", "--output", target) == (0, f"{target / 'one'}\n", "")
    assert {path.name for path in (target / "one").iterdir()} == {"manifest.json", "rank0.json"}
    assert (target / "one" / "rank0.json").read_text() == "{}"


def test_get_copies_into_the_current_directory(
    captures: Run, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "one")
    monkeypatch.chdir(tmp_path)
    assert captures("get", "one") == (0, "one\n", "")
    assert (tmp_path / "one" / "rank0.json").exists()


def test_get_drops_open_permissions_and_foreign_files(
    captures: Run, catalog: Catalog, tmp_path: Path
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


def test_get_never_overwrites(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    (tmp_path / "one").mkdir()
    assert captures("get", "one", "-o", tmp_path) == (
        1,
        "",
        f"torchperfd: {tmp_path / 'one'} exists; choose another directory with --output\n",
    )
    assert list((tmp_path / "one").iterdir()) == []


def test_get_says_why_it_cannot_copy(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    (tmp_path / "file").write_text("")
    code, out, err = captures("get", "one", "-o", tmp_path / "file" / "below")
    assert (code, out) == (1, "")
    assert err.startswith(f"torchperfd: cannot copy to {tmp_path / 'file' / 'below' / 'one'}: ")
    assert err.count("\n") == 1


def test_rm_deletes(captures: Run, catalog: Catalog) -> None:
    for capture_id in ("one", "two", "three"):
        add(catalog, capture_id)
    assert captures("rm", "one", "two") == (0, "", "deleted one\ndeleted two\n")
    assert [found.record.capture_id for found in catalog.list().captures] == ["three"]


@pytest.mark.parametrize("verb", ["get", "rm"])
def test_a_capture_that_is_not_there_is_named(captures: Run, catalog: Catalog, verb: str) -> None:
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
    assert main.run_command(["captures", "list"]) == 0
    assert str(catalog.directory) in capfd.readouterr().err
    monkeypatch.delenv("TORCHPERFD_CAPTURES_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(catalog.directory.parent / "state"))
    assert main.run_command(["captures", "list"]) == 0
    assert f"{catalog.directory.parent}/state/torchperfd/captures" in capfd.readouterr().err


def test_the_list_can_be_narrowed(captures: Run, catalog: Catalog) -> None:
    for number in range(4):
        add(catalog, f"c{number}", time.time() - 3600 * number, run="bert" if number % 2 else "gpt")
    add(catalog, "bad", 1_700_000_000.0, state=CaptureState.FAILED)

    def listed(*arguments: str) -> list[str]:
        code, out, _ = captures("list", *arguments)
        assert code == 0
        return [line.split()[0] for line in out.splitlines()[1:]]

    assert listed("--run", "bert") == ["c1", "c3"]
    assert listed("--state", "failed") == ["bad"]
    assert listed("--since", "90m") == ["c0", "c1"]
    assert listed("--since", "2023-12-01") == ["c0", "c1", "c2", "c3"]
    assert captures("list", "--limit", "2")[2] == "these are the newest 2 of 5; --limit 0 shows all\n"
    document = json.loads(captures("list", "--json", "--limit", "1", "--run", "gpt")[1])
    assert document["total"] == 2
    assert [entry["capture_id"] for entry in document["captures"]] == ["c0"]
    assert captures("list", "--run", "nope") == (0, "", f"no such captures in {catalog.directory}\n")


def test_the_table_ends_after_a_hundred_and_says_so(captures: Run, catalog: Catalog) -> None:
    for number in range(103):
        add(catalog, f"c{number}", 1_700_000_000.0 + number)
    _, out, err = captures("list")
    assert len(out.splitlines()) == 101
    assert err == "these are the newest 100 of 103; --limit 0 shows all\n"
    assert len(captures("list", "--limit", "0")[1].splitlines()) == 104
    assert len(json.loads(captures("list", "--json")[1])["captures"]) == 103


def test_what_is_pinned_is_marked_and_stays(captures: Run, catalog: Catalog) -> None:
    add(catalog, "one")
    add(catalog, "two")
    assert captures("pin", "one") == (0, "", "")
    assert [line.endswith("  pinned") for line in captures("list")[1].splitlines()[1:]] == [False, True]
    refused = (1, "", "torchperfd: capture one is pinned; `torchperfd captures unpin one` first\n")
    assert captures("rm", "two", "one") == refused
    assert (catalog.directory / "two").exists(), "all or none"
    assert captures("rm", "--older-than", "1d") == (
        0,
        "",
        "kept 1 that are pinned or in progress\ndeleted two\n",
    )
    assert captures("unpin", "one")[0] == 0
    assert captures("rm", "one") == (0, "", "deleted one\n")


def test_rm_by_age(captures: Run, catalog: Catalog) -> None:
    for days in (1, 8, 9):
        add(catalog, f"d{days}", time.time() - 86400 * days)
    assert captures("rm", "--older-than", "1w", "--dry-run") == (0, "d8\nd9\n", "")
    assert len(catalog.list().captures) == 3
    assert captures("rm", "--older-than", "7d") == (0, "", "deleted d8\ndeleted d9\n")
    assert captures("rm", "--older-than", "7d") == (0, "", "")
    assert [found.record.capture_id for found in catalog.list().captures] == ["d1"]


def test_rm_of_what_is_in_progress_is_refused(captures: Run, catalog: Catalog) -> None:
    catalog.create("20231114-221320-abcdef")
    code, out, err = captures("rm", "20231114-221320-abcdef")
    assert (code, out) == (1, "")
    assert err == "torchperfd: capture 20231114-221320-abcdef is in progress; wait until it has ended\n"


@pytest.mark.parametrize("arguments", [(), ("one", "--older-than", "7d"), ("--older-than", "7 years")])
def test_rm_wants_either_names_or_an_age(captures: Run, catalog: Catalog, arguments: tuple[str, ...]) -> None:
    add(catalog, "one")
    assert captures("rm", *arguments)[0] == 2
    assert (catalog.directory / "one").exists()


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_pinning_what_is_not_there_is_said(captures: Run, catalog: Catalog, verb: str) -> None:
    assert captures(verb, "nope")[0] == 3
    assert captures(verb, "../nope")[0] == 3


def test_a_pin_does_not_go_through_a_planted_link(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (add(catalog, "one") / ".pinned").symlink_to(victim)
    assert captures("pin", "one")[0] == 0
    assert not victim.exists()
    assert captures("unpin", "one")[0] == 0
    assert not (catalog.directory / "one" / ".pinned").is_symlink()


def test_a_socket_in_the_environment_does_not_ask_for_a_daemon(
    captures: Run, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(catalog, "one")
    monkeypatch.setenv("TORCHPERFD_SOCKET", str(tmp_path / "none.sock"))
    assert captures("get", "one", "-o", tmp_path / "out")[0] == 0
    code, _, err = captures("get", "one", "--remote", "-o", tmp_path / "more")
    assert code == 4
    assert err.startswith(f"torchperfd: no daemon answers at {tmp_path / 'none.sock'}; ")


def test_uploads_show_where_a_daemon_uploads(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, "one")
    add(catalog, "two", 1_700_003_600.0, state=CaptureState.FAILED)
    assert "UPLOADED" not in captures("list")[1]
    assert [each["uploaded"] for each in json.loads(captures("list", "--json")[1])["captures"]] == [
        "no",
        "no",
    ]
    write_upload_marker(catalog.directory, (tmp_path / "share").as_uri())
    head, *rows = (line.split() for line in captures("list")[1].splitlines())
    assert head == ["CAPTURE", "RUN", "STATE", "STEPS", "RANKS", "SIZE", "UPLOADED", "WHEN"]
    assert [(row[0], row[7]) for row in rows] == [("two", "no"), ("one", "pending")]
    found = [each["uploaded"] for each in json.loads(captures("list", "--json")[1])["captures"]]
    assert found == ["no", "pending"]


def test_upload_sends_at_once_and_says_where(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    digest = hashlib.sha256(b"{}").hexdigest()
    trace = RankTrace(0, CaptureState.COMPLETE, "", "rank0.json", 2, digest)
    for capture_id in ("one", "two"):
        add(catalog, capture_id, ranks=[trace])
    share = tmp_path / "share"
    assert captures("upload", "one") == (
        1,
        "",
        f"torchperfd: no daemon uploads the captures in {catalog.directory}; give a URL with --to\n",
    )
    write_upload_marker(catalog.directory, share.as_uri())
    assert captures("upload", "one") == (1, "", f"torchperfd: {share} does not exist; mount or create it\n")
    share.mkdir()
    assert captures("upload", "one", "two", "one") == (0, f"{share.as_uri()}/one\n{share.as_uri()}/two\n", "")
    assert {path.name for path in (share / "two").iterdir()} == {"manifest.json", "rank0.json"}
    assert {line.split()[7] for line in captures("list")[1].splitlines()[1:]} == {"yes"}
    other = tmp_path / "other"
    other.mkdir()
    assert captures("upload", "one", "--to", other.as_uri())[:2] == (0, f"{other.as_uri()}/one\n")


def test_upload_says_what_cannot_be_uploaded(captures: Run, catalog: Catalog, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    # Of one rank: with two wrong files, either may be the first that is seen.
    add(catalog, "one", ranks=[RankTrace(0, CaptureState.COMPLETE, "", "rank0.json", 1_500_000, "ab")])
    add(catalog, "going", state=CaptureState.ARMED)
    write_upload_marker(catalog.directory, tmp_path.as_uri() + "/share")
    (tmp_path / "share").mkdir()
    assert captures("upload", "one") == (
        1,
        "",
        "torchperfd: capture one is not uploaded: one/rank0.json does not have the size in its manifest\n",
    )
    assert json.loads(captures("list", "--json")[1])["captures"][1]["uploaded"] == "no"
    assert captures("upload", "going")[::2] == (
        1,
        "torchperfd: capture going is in progress, so it is not uploaded\n",
    )
    assert captures("upload", "never")[0] == 3
    assert captures("upload", "one", "--to", "nowhere")[0] == 2
    assert captures("upload", "one", "--to", catalog.directory.as_uri())[0] == 2
