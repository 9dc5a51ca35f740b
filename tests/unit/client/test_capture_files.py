"""Where captures may go, whatever a daemon says, and what lies there already."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.captures.files import CaptureFolder, CapturesDirectory
from torchperfd.safety.descriptors import are_descriptors_scarce
from torchperfd.v1 import access, contract

ID = "20260726-101502-3fa1c2"
SERVICE = 61_184
OWN = frozenset({os.geteuid()})
HOSTILE_IDS = [
    "",
    ".",
    "..",
    "results",
    "../x",
    f"../{ID}",
    f"{ID}/..",
    f"{ID}\n",
    f"{ID}\0",
    f"/{ID}",
    "x" * 9999,
]


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CapturesDirectory:
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "captures"))
    return CapturesDirectory()


@pytest.mark.parametrize("capture_id", HOSTILE_IDS)
def test_folder_of_a_hostile_id_is_refused(captures: CapturesDirectory, capture_id: str) -> None:
    with pytest.raises(ValueError, match="is no capture id"):
        captures.folder(capture_id)


@given(st.text())
def test_folder_of_any_id_is_right_below_or_refused(capture_id: str) -> None:
    captures = CapturesDirectory()
    try:
        folder = captures.folder(capture_id)
    except ValueError:
        return
    assert (folder.parent, folder.name) == (captures.path, capture_id)


def test_folder_elsewhere_is_refused(captures: CapturesDirectory, tmp_path: Path) -> None:
    assert captures.folder(ID, str(captures.path / ID)) == captures.path / ID
    for directory in (tmp_path, tmp_path / ID, captures.path, f"{captures.path}/../{ID}", "relative", "/etc"):
        with pytest.raises(ValueError, match="is not the folder of capture"):
            captures.folder(ID, str(directory))


def test_offer_of_root_or_this_user_is_taken(captures: CapturesDirectory, tmp_path: Path) -> None:
    for uid in (0, os.geteuid()):
        assert captures.offer(str(tmp_path / str(uid)), uid) == ""
        assert captures.path == tmp_path / str(uid)
    assert captures.offer("", os.geteuid()) == ""
    before = captures.path
    for directory in ("relative", f"{tmp_path}/../up"):
        assert "no absolute path" in captures.offer(directory, 0)
    assert captures.path == before


def test_service_offer_is_taken_only_where_it_keeps_captures(
    captures: CapturesDirectory, tmp_path: Path
) -> None:
    own = captures.path
    (tmp_path / "mine").mkdir()
    for directory in (tmp_path / "mine", tmp_path / "none", Path("/etc"), Path("/root")):
        assert "TORCHPERFD_CAPTURES_DIR" in captures.offer(str(directory), SERVICE)
        assert captures.path == own
    assert captures.offer(contract.SYSTEM_CAPTURES, SERVICE) == ""
    assert captures.offer(str(own), SERVICE) == ""
    assert captures.owners >= {SERVICE, 0, os.geteuid()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_capture_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / ID).mkdir()
    os.chown(tmp_path / ID, SERVICE, SERVICE)
    with (
        pytest.raises(access.UntrustedError, match=f"belongs to user {SERVICE}"),
        CaptureFolder.opened(tmp_path / ID, OWN),
    ):
        pass
    with CaptureFolder.opened(tmp_path / ID, OWN | {SERVICE}):
        pass


def test_capture_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ID).symlink_to("elsewhere")
    with pytest.raises(OSError), CaptureFolder.opened(tmp_path / ID, OWN):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_capture_folder_follows_no_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / ID
    path.mkdir()
    for name in ("rank0.json", "rank0.manifest.json", ".rank0.json.part"):
        (path / name).symlink_to(victim)
    with CaptureFolder.opened(path, OWN) as folder:
        folder.check_writable("rank0.json")
        with pytest.raises(OSError):
            folder.open("rank0.json")
        folder.write("rank0.manifest.json", b"{}")
        part = folder.new_name("rank0.json")
        assert part.endswith(".json")
        folder.path_of(part).write_text("trace")
        folder.rename(part, "rank0.json")
        folder.remove_hidden("rank0")
    assert victim.read_text() == "precious"
    assert {each.name: each.is_symlink() for each in path.iterdir()} == {
        "rank0.json": False,
        "rank0.manifest.json": False,
    }
    assert (path / "rank0.json").read_text() == "trace"


def test_capture_folder_renamed_meanwhile_stays_the_same(tmp_path: Path) -> None:
    with CaptureFolder.opened(tmp_path / ID, OWN) as folder:
        (tmp_path / ID).rename(tmp_path / "moved")
        (tmp_path / "trap").mkdir()
        (tmp_path / ID).symlink_to("trap")
        folder.path_of("x.json").write_text("trace")
        folder.write("y.json", b"{}")
    assert sorted(each.name for each in (tmp_path / "moved").iterdir()) == ["x.json", "y.json"]
    assert list((tmp_path / "trap").iterdir()) == []


@pytest.mark.parametrize("are_counted", [True, False], ids=["counted by the kernel", "before Linux 6.2"])
def test_script_short_of_descriptors_keeps_its_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_counted: bool
) -> None:
    real = os.stat
    if not are_counted:
        no_count = SimpleNamespace(st_size=0)
        monkeypatch.setattr(
            os, "stat", lambda path, **rest: no_count if path == "/proc/self/fd" else real(path, **rest)
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1
    folder = tmp_path / ID
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
        with pytest.raises(OSError, match="few more files may be open"), CaptureFolder.opened(folder, OWN):
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        assert are_descriptors_scarce()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 32, hard))
        with CaptureFolder.opened(folder, OWN):
            assert folder.is_dir()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
