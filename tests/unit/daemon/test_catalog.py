"""The captures directory: what is kept there, and that hostile files in it lead nowhere else."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.manifest import (
    CaptureOptions,
    CaptureRecord,
    CaptureState,
    RankTrace,
    first_reason,
    overall_state,
)
from torchperfd_daemon.captures.retention import Quota, delete_tree
from torchperfd_daemon.errors import DiskFullError, NoSuchTargetError, TorchperfdError
from torchperfd_daemon.untrusted_files import decode_clean

HOSTILE_IDS = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    "a\0b",
    "-rf",
    "_x",
    "a b",
    "a\n",
    "é",
    "x" * 10_000,
    "x" * 81,
]


@pytest.fixture
def odd_umask() -> Iterator[None]:
    previous = os.umask(0o077)
    yield
    os.umask(previous)


def record(capture_id: str = "one", **more: Any) -> CaptureRecord:
    return CaptureRecord(
        **{
            "capture_id": capture_id,
            "run": "bert-17",
            "trigger": "command",
            "requested_at": 1_700_000_000.5,
            "state": CaptureState.PARTIAL,
            "reason": "rank 1: gone",
            "step_range": (120, 125),
            "options": CaptureOptions(steps=5, record_shapes=True),
            "ranks": [
                RankTrace(0, CaptureState.COMPLETE, "", "rank0.json", 10, "ab"),
                RankTrace(1, CaptureState.FAILED, "gone"),
            ],
            **more,
        }
    )


def listed(catalog: Catalog) -> list[CaptureRecord]:
    return [found.record for found in catalog.list().captures]


def saved(catalog: Catalog, capture_id: str = "one", **more: Any) -> Path:
    folder = catalog.create(capture_id)
    catalog.save(record(capture_id, **more))
    return folder


def rank_manifest(rank: int, **more: Any) -> dict[str, Any]:
    """Return what a rank of ours writes; the keys are those of the client."""
    return {
        "schema": "torchperfd.capture.rank/1",
        "capture_id": "own",
        "run": "bert-17",
        "job_name": "loop",
        "world_size": 16,
        "trigger": "script",
        "rank": rank,
        "node": "node-a",
        "pid": 4711,
        "state": "complete",
        "reason": "",
        "step_range": [40, 45],
        "steps_made": 5,
        "file": f"rank{rank}.json",
        "bytes": 9,
        "sha256": "ab",
        "pause_seconds": 0.5,
        "options": {"steps": 5, "record_shapes": False, "with_stack": True, "profile_memory": False},
        "torchperfd_version": "0.1.0",
        "python_version": "3.11.7",
        "torch_version": "2.13.0",
        **more,
    }


def write_rank(catalog: Catalog, rank: int, capture_id: str = "own", **more: Any) -> Path:
    folder = catalog.directory / capture_id
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.manifest.json"
    path.write_text(json.dumps(rank_manifest(rank, **more)))
    return path


def test_what_is_saved_is_read_back_whole(catalog: Catalog) -> None:
    folder = saved(catalog)
    assert catalog.get("one") == record("one")
    document = json.loads((folder / "manifest.json").read_text())
    assert document["schema"] == "torchperfd.capture/1"
    assert document["step_range"] == [120, 125]
    assert document["ranks"][1] == {
        "rank": 1,
        "state": "failed",
        "reason": "gone",
        "file": "",
        "bytes": 0,
        "sha256": "",
        "steps_made": 0,
        "node": "",
        "pid": 0,
        "clock_offset_ns": 0,
        "torch_version": "",
        "python_version": "",
        "client_version": "",
        "uid": None,
        "pause_seconds": 0.0,
        "coordinates": "",
        "step_change": None,
        "launches": 0,
        "kernels": 0,
    }
    assert [path.name for path in folder.iterdir()] == ["manifest.json"], "no part is left"


def test_captures_are_listed_newest_first(catalog: Catalog) -> None:
    assert listed(catalog) == []
    for number, capture_id in enumerate(("b", "a", "c")):
        saved(catalog, capture_id, requested_at=1000.0 + number)
    assert [found.capture_id for found in listed(catalog)] == ["c", "a", "b"]


def test_a_capture_is_removed_with_all_its_files(catalog: Catalog) -> None:
    folder = saved(catalog)
    (folder / "rank0.json").write_text("{}")
    saved(catalog, "two")
    catalog.remove("one")
    assert not folder.exists()
    assert [found.capture_id for found in listed(catalog)] == ["two"]
    with pytest.raises(NoSuchTargetError, match=r"no capture one in .*captures list"):
        catalog.remove("one")


def test_removed_capture_leaves_the_list_before_its_files(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(catalog)
    seen = []

    def watched(name: str, parent: int) -> bool:
        seen.append((listed(catalog), sorted(os.listdir(catalog.directory / name))))
        return delete_tree(name, parent)

    monkeypatch.setattr("torchperfd_daemon.captures.retention.delete_tree", watched)
    catalog.remove("one")
    assert seen == [([], ["manifest.json"])]


def test_what_cannot_be_deleted_is_said(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(catalog)

    def refuse(name: str, parent: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("torchperfd_daemon.captures.retention.delete_tree", refuse)
    with pytest.raises(TorchperfdError, match=r"cannot delete .*/one: Operation not permitted; "):
        catalog.remove("one")
    assert catalog.get("one") == record("one"), "it is back in its place"


@pytest.mark.parametrize("capture_id", HOSTILE_IDS)
def test_a_hostile_id_names_nothing(catalog: Catalog, tmp_path: Path, capture_id: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_bytes(record("x").encode())
    catalog.directory.mkdir()
    for call in (catalog.folder, catalog.get, catalog.remove, catalog.create):
        with pytest.raises(NoSuchTargetError, match="is no capture id") as caught:
            call(capture_id)
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()
    with pytest.raises(NoSuchTargetError):
        catalog.save(record(capture_id))
    assert (tmp_path / "x" / "manifest.json").exists()
    assert list(catalog.directory.iterdir()) == []


def test_capture_folder_is_private_whatever_the_umask_is(catalog: Catalog, odd_umask: None) -> None:
    folder = catalog.create("one")
    catalog.save(record("one"))
    for path, mode in ((catalog.directory, 0o700), (folder, 0o700), (folder / "manifest.json", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_make_private_tightens_an_older_versions_directory(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    catalog.make_private()
    assert (stat.S_IMODE(catalog.directory.stat().st_mode), caplog.text) == (0o700, "")
    saved(catalog)
    catalog.directory.chmod(0o1777)
    catalog.make_private()
    assert stat.S_IMODE(catalog.directory.stat().st_mode) == 0o700
    assert "was open to other users (mode 1777): now it is this daemon's alone (mode 700)" in caplog.text
    assert listed(catalog) == [record("one")], "its captures stay"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_make_private_of_another_users_directory_is_refused(catalog: Catalog) -> None:
    catalog.directory.mkdir(mode=0o755)
    os.chown(catalog.directory, 61_001, 61_001)
    with pytest.raises(TorchperfdError, match=r"belongs to user 61001, not .* user 0; `chown 0 "):
        catalog.make_private()


def test_a_folder_that_is_there_already_is_not_taken_over(catalog: Catalog) -> None:
    catalog.create("one")
    with pytest.raises(TorchperfdError, match=r"cannot write to .*captures: File exists; .*--captures-dir"):
        catalog.create("one")


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TorchperfdError, match=r"cannot write to .*file: Not a directory; .*--captures-dir"):
        Catalog(tmp_path / "file").create("one")


def test_a_disk_that_is_nearly_full_begins_no_capture(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    directory = tmp_path / "new" / "captures"
    beyond = Catalog(directory, Quota(free_bytes=disk.f_blocks * disk.f_frsize + 1))
    with pytest.raises(
        DiskFullError, match=r"only [\d,]+ MiB are free on the disk of .* must stay free; "
    ) as error:
        beyond.create("one")
    assert "torchperfd captures rm --older-than" in error.value.remedy
    assert list(directory.iterdir()) == []
    assert Catalog(directory, Quota(free_bytes=1)).create("one").is_dir()


def test_trace_beyond_its_share_is_dropped_and_rank_fails(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "captures", Quota(capture_bytes=300))
    folder = catalog.create("one")
    sizes = {0: 100, 1: 101, 2: 5}
    for rank, size in sizes.items():
        (folder / f"rank{rank}.json").write_bytes(b"x" * size)
    written = record(
        ranks=[
            RankTrace(rank, CaptureState.COMPLETE, "", f"rank{rank}.json", size)
            for rank, size in sizes.items()
        ]
    )
    catalog.enforce_cap(written)
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank2.json"]
    assert written.ranks[1] == RankTrace(
        1,
        CaptureState.FAILED,
        "the trace has 101 bytes, 100 are allowed; capture fewer steps or raise --captures-max-bytes-each",
    )
    assert [trace.state for trace in written.ranks].count(CaptureState.COMPLETE) == 2


def test_the_cap_deletes_nothing_outside_the_folder(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "captures", Quota(capture_bytes=1))
    catalog.create("one")
    (tmp_path / "captures" / "precious").write_text("x")
    written = record(ranks=[RankTrace(0, CaptureState.COMPLETE, "", "../precious", 9)])
    catalog.enforce_cap(written)
    assert written.ranks[0].state is CaptureState.FAILED
    assert (tmp_path / "captures" / "precious").exists()


def test_saving_does_not_write_through_a_planted_link(catalog: Catalog, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = catalog.create("one")
    for name in ("manifest.json", ".manifest.json.part", ".manifest.json"):
        (folder / name).symlink_to(victim)
    catalog.save(record("one"))
    assert victim.read_text() == "precious"
    assert not (folder / "manifest.json").is_symlink()
    assert decode_clean((folder / "manifest.json").read_bytes(), CaptureRecord) == record("one")


def test_saving_does_not_open_a_name_that_is_taken(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = catalog.create("one")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (folder / ".manifest.json.guessed").symlink_to(victim)
    with pytest.raises(TorchperfdError, match=r"cannot write the manifest in .*/one: File exists"):
        catalog.save(record("one"))
    assert victim.read_text() == "precious"
    (folder / ".manifest.json.guessed").unlink()
    os.link(victim, folder / ".manifest.json.guessed")
    with pytest.raises(TorchperfdError, match="File exists"):
        catalog.save(record("one"))
    assert victim.read_text() == "precious"


def test_a_folder_swapped_for_a_link_is_not_followed(catalog: Catalog, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    catalog.directory.mkdir()
    (catalog.directory / "one").symlink_to(elsewhere)
    with pytest.raises(TorchperfdError, match="cannot write the manifest"):
        catalog.save(record("one"))
    assert list(elsewhere.iterdir()) == []
    (elsewhere / "manifest.json").write_bytes(record("one").encode())
    assert listed(catalog) == []
    with pytest.raises(NoSuchTargetError):
        catalog.remove("one")
    assert (elsewhere / "manifest.json").exists()


def test_a_failed_save_leaves_no_part_behind(catalog: Catalog) -> None:
    folder = catalog.create("one")
    (folder / "manifest.json").mkdir()
    with pytest.raises(TorchperfdError, match=r"cannot write the manifest in .*/one: Is a directory"):
        catalog.save(record("one"))
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("name", ["manifest.json", "rank0.manifest.json"])
def test_open_pipe_is_no_manifest(catalog: Catalog, name: str) -> None:
    path = catalog.create("evil") / name
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    try:
        assert listed(catalog) == []
    finally:
        os.close(held)


@pytest.mark.parametrize("name", ["manifest.json", "rank0.manifest.json"])
@pytest.mark.parametrize("through", ["symlink", "fifo", "directory", "too big", "too deep"])
def test_a_hostile_manifest_is_no_manifest(catalog: Catalog, tmp_path: Path, name: str, through: str) -> None:
    good = record("evil").encode() if name == "manifest.json" else json.dumps(rank_manifest(0)).encode()
    outside = tmp_path / "outside.json"
    outside.write_bytes(good)
    saved(catalog, "good")
    path = catalog.create("evil") / name
    path.write_bytes(good)
    assert len(listed(catalog)) == 2, "as a plain file it counts"
    path.unlink()
    match through:
        case "symlink":
            path.symlink_to(outside)
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "too big":
            path.write_bytes(good + b" " * (1024 * 1024))
        case "too deep":
            path.write_bytes(good.rstrip()[:-1] + b', "more": ' + b"[" * 500_000)
    assert [found.capture_id for found in listed(catalog)] == ["good"]
    with pytest.raises(NoSuchTargetError):
        catalog.get("evil")


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"{}",
        record().encode()[:-20],
        record().encode().replace(b"1700000000.5", b"1e300"),
        record().encode().replace(b'"partial"', b'"great"'),
        record().encode().replace(b'"bytes": 10', b'"bytes": 99999999999999999999999'),
    ],
)
def test_a_broken_manifest_is_skipped(catalog: Catalog, document: bytes) -> None:
    saved(catalog, "good")
    (catalog.create("broken") / "manifest.json").write_bytes(document)
    assert [found.capture_id for found in listed(catalog)] == ["good"]


def test_other_things_in_the_directory_are_no_captures(catalog: Catalog) -> None:
    saved(catalog)
    (catalog.directory / "empty").mkdir()
    (catalog.directory / "note.txt").write_text("hello")
    odd = catalog.directory / "\x1b[31m"
    odd.mkdir()
    (odd / "manifest.json").write_bytes(record("one").encode())
    assert [found.capture_id for found in listed(catalog)] == ["one"]


def test_a_manifest_cannot_pass_itself_off_as_another_capture(catalog: Catalog) -> None:
    folder = catalog.create("two")
    (folder / "manifest.json").write_bytes(record("../../home/me").encode())
    assert catalog.get("two").capture_id == "two"
    assert [found.capture_id for found in listed(catalog)] == ["two"]


def test_a_record_is_put_together_from_the_ranks_manifests(catalog: Catalog) -> None:
    for rank in (0, 10, 2):
        path = write_rank(catalog, rank)
        os.utime(path, (1_600_000_000, 1_600_000_000))
    found = catalog.get("own")
    assert found == CaptureRecord(
        capture_id="own",
        run="bert-17",
        trigger="script",
        requested_at=1_600_000_000.0,
        state=CaptureState.COMPLETE,
        step_range=(40, 45),
        options=CaptureOptions(steps=5, with_stack=True),
        job_name="loop",
        world_size=16,
        ranks=[
            RankTrace(
                rank,
                CaptureState.COMPLETE,
                "",
                f"rank{rank}.json",
                9,
                "ab",
                steps_made=5,
                node="node-a",
                pid=4711,
                torch_version="2.13.0",
                python_version="3.11.7",
                client_version="0.1.0",
                pause_seconds=0.5,
                uid=os.geteuid(),
            )
            for rank in (0, 2, 10)
        ],
    )
    assert listed(catalog) == [found]
    write_rank(catalog, 11, state="failed", reason="disk full", file="")
    assert catalog.get("own").state is CaptureState.PARTIAL
    assert catalog.get("own").reason == "rank 11: disk full"


@pytest.mark.parametrize(
    "damage",
    [
        {"rank": "zero"},
        {"rank": -1},
        {"state": "great"},
        {"bytes": 1e300},
        {"bytes": -1},
        {"step_range": [1]},
        {"step_range": None},
        {"options": {"steps": "many"}},
        {"options": []},
        {"run": 7},
    ],
)
def test_a_broken_rank_manifest_costs_that_rank_only(catalog: Catalog, damage: dict[str, Any]) -> None:
    write_rank(catalog, 0)
    write_rank(catalog, 1).write_text(json.dumps(rank_manifest(1) | damage))
    assert [trace.rank for trace in catalog.get("own").ranks] == [0]


def test_the_daemons_manifest_comes_before_the_ranks(catalog: Catalog) -> None:
    saved(catalog, "own")
    write_rank(catalog, 7)
    assert catalog.get("own").trigger == "command"


def test_the_whole_is_what_its_ranks_are() -> None:
    complete, failed = RankTrace(0, CaptureState.COMPLETE), RankTrace(1, CaptureState.FAILED, "no disk")
    assert overall_state([]) is CaptureState.FAILED
    assert overall_state([complete, complete]) is CaptureState.COMPLETE
    assert overall_state([complete, failed]) is CaptureState.PARTIAL
    assert overall_state([failed, failed]) is CaptureState.FAILED
    assert first_reason([complete]) == ""
    assert first_reason([complete, failed]) == "rank 1: no disk"
    assert first_reason([failed, RankTrace(2, CaptureState.FAILED, "x")]) == "rank 1: no disk (and 1 more)"


# What is not printable is replaced as it is read.
LINES = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "))
RECORDS = st.builds(
    CaptureRecord,
    capture_id=st.just("one"),
    run=LINES,
    trigger=st.sampled_from(["command", "script"]),
    requested_at=st.floats(0, 4e9),
    state=st.sampled_from(CaptureState),
    reason=LINES,
    step_range=st.none() | st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)),
    options=st.builds(CaptureOptions, st.integers(1, 1000), st.booleans(), st.booleans(), st.booleans()),
    ranks=st.lists(
        st.builds(RankTrace, st.integers(0, 2**32 - 1), st.sampled_from(CaptureState), LINES, LINES),
        max_size=3,
    ),
)


@given(RECORDS)
def test_encoding_loses_nothing(written: CaptureRecord) -> None:
    assert decode_clean(written.encode(), CaptureRecord) == written


@settings(max_examples=200)
@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*rank_manifest(0), "trigger", "requested_at"]), inner, max_size=12
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_manifest_breaks_the_list(document: bytes) -> None:

    with tempfile.TemporaryDirectory() as directory:
        catalog = Catalog(Path(directory))
        for name in ("manifest.json", "rank0.manifest.json"):
            (catalog.directory / "a").mkdir(exist_ok=True)
            (catalog.directory / "a" / name).write_bytes(document)
        assert len(listed(catalog)) <= 1
