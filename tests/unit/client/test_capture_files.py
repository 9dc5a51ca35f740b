"""Files of a capture: folders that are safe, and traces that are whole."""

import os
import resource
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchperfd.captures.files import CaptureFolder, CapturesDirectory, Handover
from torchperfd.captures.rank_files import _is_whole
from torchperfd.safety.descriptors import are_descriptors_scarce
from torchperfd.v1 import access, contract

ID = "20260726-101502-3fa1c2"
SERVICE = 61_184
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


def test_directory_of_this_users_daemon_is_taken(captures: CapturesDirectory, tmp_path: Path) -> None:
    own = captures.path
    assert captures.on_welcome(str(tmp_path / "daemon"), None, os.geteuid()) == ""
    assert (captures.path, captures.refusal) == (tmp_path / "daemon", "")
    for directory in ("relative", f"{tmp_path}/../up"):
        assert "no absolute path" in captures.on_welcome(directory, None, os.geteuid())
        assert captures.path == own
    assert captures.on_welcome("", None, os.geteuid()) == ""
    assert captures.path == own


def test_directory_of_another_users_daemon_is_not_used(captures: CapturesDirectory, tmp_path: Path) -> None:
    own = captures.path
    for directory in (str(tmp_path), contract.SYSTEM_CAPTURES, str(own), "/etc"):
        assert captures.on_welcome(directory, None, SERVICE) == ""
        assert captures.path == own
        assert f"the daemon of user {SERVICE} is too old to take captures" in captures.refusal
    handover = Handover("/run/daemon.sock", SERVICE, "token")
    assert captures.on_welcome("", handover, SERVICE) == ""
    assert (captures.path, captures.refusal, captures.handover) == (own, "", handover)


def test_handover_without_a_writable_home_uses_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHPERFD_CAPTURES_DIR", str(tmp_path / "file" / "captures"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    captures = CapturesDirectory()
    captures.on_welcome("", Handover("/run/daemon.sock", SERVICE, "token"), SERVICE)
    folder = captures.folder(ID)
    assert folder.parent.parent == tmp_path
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert captures.folder(ID) == folder, "one place for all"


def test_files_are_their_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "captures" / ID
    before = os.umask(0)
    try:
        with CaptureFolder.opened(path) as folder:
            folder.write("rank0.manifest.json", b"{}")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path, path / "rank0.manifest.json")]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_capture_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / ID).mkdir()
    os.chown(tmp_path / ID, SERVICE, SERVICE)
    with (
        pytest.raises(access.UntrustedError, match=f"belongs to user {SERVICE}"),
        CaptureFolder.opened(tmp_path / ID),
    ):
        pass


def test_capture_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ID).symlink_to("elsewhere")
    with pytest.raises(OSError), CaptureFolder.opened(tmp_path / ID):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_capture_folder_follows_no_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / ID
    path.mkdir()
    for name in ("rank0.json", "rank0.manifest.json", ".rank0.json.part"):
        (path / name).symlink_to(victim)
    with CaptureFolder.opened(path) as folder:
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
    with CaptureFolder.opened(tmp_path / ID) as folder:
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
        with pytest.raises(OSError, match="few more files may be open"), CaptureFolder.opened(folder):
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        assert are_descriptors_scarce()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 32, hard))
        with CaptureFolder.opened(folder):
            assert folder.is_dir()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "whole.json"
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        for _ in range(20):
            torch.ones(4).sum()
    profiler.export_chrome_trace(str(path))
    return path.read_bytes()


def is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        return _is_whole(file)


def test_what_kineto_writes_is_whole(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(trace)
    assert is_whole(path)


def test_no_beginning_of_it_is(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    *braces, _ = [position for position, byte in enumerate(trace) if byte == ord("}")]
    # After a brace is where a cut looks most like an end.
    for end in [0, 1, len(trace) // 2, *(brace + 1 for brace in braces[::7]), braces[-1] + 1]:
        path.write_bytes(trace[:end])
        assert not is_whole(path), end
