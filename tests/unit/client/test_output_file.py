"""Outputs that a user names, in directories where other users may have put something before."""

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchperfd.v1.access import UntrustedError, write_file

OTHER = 61_184
"""A user id that is unused on this machine."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o1777)
        yield Path(made)


def test_write_file_is_there_whole_or_not_at_all(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared / "report.json"
    write_file(path, b"first")
    path.chmod(0o640)
    with path.open("rb") as reader:
        write_file(path, b"second, longer")
        assert reader.read() == b"first", "who reads it meanwhile has the whole one"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second, longer", 0o640)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"third")
    assert path.read_bytes() == b"second, longer"
    assert os.listdir(shared) == ["report.json"]


def test_write_file_follows_a_link_of_ones_own(shared: Path) -> None:
    for target in ("there", "absent"):
        (shared / "there").write_text("old")
        link = shared / f"link-{target}"
        link.symlink_to(shared / target)
        write_file(link, b"new")
        assert link.is_symlink()
        assert (shared / target).read_bytes() == b"new"


def test_write_file_without_a_directory_or_onto_one_fails(shared: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(shared / "absent" / "file", b"")
    with pytest.raises(IsADirectoryError):
        write_file(shared, b"")


@needs_root
def test_write_file_behind_a_strangers_link_is_refused(shared: Path) -> None:
    victim, link = shared / "victim", shared / "report.json"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(UntrustedError, match=f"is a link of user {OTHER}; choose another file"):
        write_file(link, b"report")
    assert victim.read_text() == "precious"


@needs_root
@pytest.mark.parametrize("with_reader", [False, True])
def test_write_file_into_a_strangers_pipe_is_refused(shared: Path, with_reader: bool) -> None:
    path = shared / "page.html"
    os.mkfifo(path, 0o666)
    os.chown(path, OTHER, OTHER)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if with_reader else -1
    with pytest.raises(UntrustedError if with_reader else OSError) as raised:
        write_file(path, b"secret")
    if with_reader:
        assert os.read(reader, 100) == b""
        os.close(reader)
    else:
        assert raised.value.errno == errno.ENXIO


@needs_root
def test_write_file_onto_a_strangers_file_gives_it_nothing(shared: Path) -> None:
    path = shared / "page.html"
    path.write_text("planted")
    path.chmod(0o666)
    os.chown(path, OTHER, OTHER)
    with path.open() as planted:
        write_file(path, b"secret")
        assert planted.read() == "planted"
    assert path.stat().st_uid == os.geteuid()
    assert not path.stat().st_mode & 0o022


@needs_root
def test_write_file_of_a_user_leaves_a_strangers_in_place(shared: Path) -> None:
    """In a directory like /tmp only root could replace it."""
    path = shared / "page.html"
    path.write_text("planted")
    path.chmod(0o666)
    os.chown(path, OTHER + 1, OTHER + 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            write_file(path, b"secret")
        except UntrustedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_text() == "planted"
    assert os.listdir(shared) == ["page.html"]


def test_write_file_into_a_pipe_of_ones_own_writes_all(shared: Path) -> None:
    path, content, read = shared / "pipe", b"x" * 300_000, []
    os.mkfifo(path)
    with pytest.raises(OSError) as raised:
        write_file(path, content)
    assert raised.value.errno == errno.ENXIO, "no reader: it does not wait for one"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    # A second writer, so that the reader does not see the end of the file before it begins.
    with os.fdopen(reader, "rb") as file, path.open("wb"):
        thread = threading.Thread(target=lambda: read.append(file.read(len(content))))
        thread.start()
        write_file(path, content)
        thread.join()
    assert read == [content]


def test_write_file_to_a_device_or_descriptor_writes_there(shared: Path) -> None:
    write_file(Path(os.devnull), b"nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    reading, writing = os.pipe()
    write_file(Path(f"/proc/self/fd/{writing}"), b"through a pipe")
    assert os.read(reading, 100) == b"through a pipe"
    os.close(reading)
    os.close(writing)


def test_write_file_in_a_read_only_directory_is_in_place(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a single file that a container has mounted."""
    path = shared / "report.json"
    path.write_text("a longer one")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuse)
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
