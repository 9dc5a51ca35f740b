"""The directory of kept runs: one report per run, readable by this user alone, the oldest go first."""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.report.record import NoSuchRunError, RunFileError, RunRecord, read_record
from torchperfd.v1 import access

MAX_BYTES: Final = 64 << 20
MAX_RUNS: Final = 1000
_MAX_READ: Final = 64 << 20
_SUFFIX: Final = ".json"
_MAX_ID: Final = 120
_MAX_NAMED: Final = 8
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EMLINK)
"""Errors of a file system that has no hard links."""
MAX_HEADS: Final = 64
"""Files whose beginnings :meth:`RunStore.newest_with` reads."""
_HEAD_BYTES: Final = 1024
_PART_SECONDS: Final = 3600.0
"""Age at which a file that was never finished is removed."""
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class KeptRun:
    """One file of the directory.

    Attributes:
        run_id: Name of the run; with ``.2`` behind it for the second run of that name.
        modified: When it was written, Unix seconds.
    """

    run_id: str
    bytes: int
    modified: float


class RunStore:
    """Keeps reports of runs in a directory.

    Args:
        directory: Made with mode 700 when the first run is kept.
        most_bytes: Size of all reports together, beyond which the oldest are removed.
        most_runs: The same, as a number of runs.
    """

    def __init__(self, directory: str, most_bytes: int = MAX_BYTES, most_runs: int = MAX_RUNS) -> None:
        self.directory = os.path.abspath(directory)  # noqa: PTH100 - no pathlib in a training process
        self._most_bytes = most_bytes
        self._most_runs = most_runs

    def keep(self, document: dict[str, Any]) -> str:
        """Write a report under a name that is not taken, remove what is too much, and return the run's id.

        The file appears as a whole or not at all.

        Raises:
            OSError: It cannot be written; ``access.UntrustedError`` where another user could change it.
        """
        content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        with self._opened(create=True) as directory:
            part = f".{os.urandom(8).hex()}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                with open(os.open(part, flags, 0o600, dir_fd=directory), "wb") as file:  # noqa: PTH123
                    file.write(content)
                run_id = _publish(directory, part, file_id(str(document["run"])))
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=directory)
            self._remove_oldest(directory, besides=run_id)
        return run_id

    def list(self) -> list[KeptRun]:
        """Return the kept runs, newest first; none where the directory is missing.

        Raises:
            OSError: The directory cannot be read, or other users could change it.
        """
        try:
            with self._opened() as directory:
                return _listed(directory)
        except FileNotFoundError:
            return []

    def find(self, given: str) -> str | None:
        """Return the id of the only run with a prefix, or of the run of exactly that name; None without one.

        Raises:
            NoSuchRunError: Several runs begin so; the message lists them.
            OSError: The directory cannot be read.
        """
        names = [each.run_id for each in self.list()]
        found = [name for name in names if given and name.startswith(given)]
        if given in found or len(found) == 1:
            return given if given in found else found[0]
        if len(found) > 1:
            some = ", ".join(sorted(found)[:_MAX_NAMED])
            raise NoSuchRunError(f"{len(found)} runs begin with {given[:80]}: {some}", "write more of one")
        return None

    def whole_id(self, given: str) -> str:
        """Return the id of the only run with a prefix.

        Raises:
            NoSuchRunError: No run begins so, or several do.
            OSError: The directory cannot be read.
        """
        found = self.find(given)
        if found is None:
            from torchperfd.model.formatting import did_you_mean

            hint = did_you_mean(given, (each.run_id for each in self.list()))
            raise NoSuchRunError(f"no kept run {given[:80]}", hint or "`torchperfd runs` lists them")
        return found

    def content(self, run_id: str) -> bytes:
        """Return the report of a kept run as it was written.

        Raises:
            NoSuchRunError: There is none.
            RunFileError: It cannot be read.
        """
        try:
            with self._opened() as directory:
                return _content(access.open_file(directory, run_id + _SUFFIX, os.O_RDONLY), run_id)
        except FileNotFoundError:
            raise NoSuchRunError(f"no run {run_id} is kept", "`torchperfd runs` lists them") from None
        except OSError as error:
            raise RunFileError(f"the report of {run_id} cannot be read: {error}") from error

    def read(self, run_id: str) -> RunRecord:
        """Return a kept run.

        Raises:
            NoSuchRunError: There is none.
            RunFileError: It cannot be read, or is damaged.
        """
        return read_record(self.content(run_id), run_id)

    def newest_with(self, marker: bytes, most: int, most_bytes: int) -> Iterator[tuple[str, bytes]]:
        """Yield the ids and reports of the newest runs with a text in their first kilobyte, the newest first.

        Only that of the newest :data:`MAX_HEADS` is read.

        Args:
            marker: As it is in the file.
            most: How many reports.
            most_bytes: Size of a report, beyond which it is left out.

        Raises:
            OSError: The directory cannot be read, or other users could change it.
        """
        for each in self.list()[:MAX_HEADS]:
            if most and each.bytes <= most_bytes and marker in self._head(each.run_id):
                with suppress(RunFileError, NoSuchRunError):
                    yield each.run_id, self.content(each.run_id)
                    most -= 1

    def remove(self, run_id: str) -> None:
        """Delete the report of a run.

        Raises:
            NoSuchRunError: There is none.
            OSError: It cannot be deleted.
        """
        try:
            with self._opened() as directory:
                os.unlink(run_id + _SUFFIX, dir_fd=directory)
        except FileNotFoundError:
            raise NoSuchRunError(f"no run {run_id} is kept", "`torchperfd runs` lists them") from None

    def _head(self, run_id: str) -> bytes:
        """Return the beginning of a file; nothing where it cannot be read."""
        try:
            with (
                self._opened() as directory,
                open(access.open_file(directory, run_id + _SUFFIX, os.O_RDONLY), "rb") as file,  # noqa: PTH123
            ):
                return file.read(_HEAD_BYTES)
        except OSError:
            return b""

    @contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[int]:
        with access.opened_directory(self.directory, create=create) as checked:
            # The checked descriptor only names the directory; listing needs one that reads.
            directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=checked)
        try:
            if access.may_others_write(os.fstat(directory)):
                raise access.UntrustedError(
                    f"other users may write to {self.directory}; `chmod 700 {self.directory}`"
                )
            yield directory
        finally:
            os.close(directory)

    def _remove_oldest(self, directory: int, besides: str) -> None:
        total = 0
        for number, each in enumerate(_listed(directory)):
            total += each.bytes
            if (total > self._most_bytes or number >= self._most_runs) and each.run_id != besides:
                with suppress(OSError):
                    os.unlink(each.run_id + _SUFFIX, dir_fd=directory)
        for name in os.listdir(directory):
            # What a process that was killed has left.
            if name.startswith(".") and name.endswith(".part"):
                with suppress(OSError):
                    if (
                        time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
                        > _PART_SECONDS
                    ):
                        os.unlink(name, dir_fd=directory)


def read_file(path: str) -> RunRecord:
    """Read the report of a run that the user has named.

    Raises:
        RunFileError: It cannot be read, is damaged, or something else.
    """
    try:
        # Non-blocking, since opening a pipe could wait forever.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        content = _content(file, path)
    except OSError as error:
        raise RunFileError(f"{path} cannot be read: {error.strerror}") from error
    return read_record(content, path)


def file_id(run: str) -> str:
    """Return a run's name as a file's: characters beyond letters, digits and ``_.+-`` are replaced."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", run[:_MAX_ID])
    return name if _ID.fullmatch(name) else f"_{name}"


def _publish(directory: int, part: str, name: str) -> str:
    number = 1
    while True:
        run_id = name if number == 1 else f"{name}.{number}"
        try:
            # A link, since a rename would replace the report of an earlier run.
            os.link(part, run_id + _SUFFIX, src_dir_fd=directory, dst_dir_fd=directory)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(part, run_id + _SUFFIX, src_dir_fd=directory, dst_dir_fd=directory)
        return run_id


def _listed(directory: int) -> list[KeptRun]:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            run_id = entry.name.removesuffix(_SUFFIX)
            if run_id == entry.name or not _ID.fullmatch(run_id):
                continue
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(KeptRun(run_id, status.st_size, status.st_mtime))
    return sorted(found, key=lambda each: (-each.modified, each.run_id))


def _content(descriptor: int, name: str) -> bytes:
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RunFileError(f"{name} is no regular file")
        content = file.read(_MAX_READ + 1)
    if len(content) > _MAX_READ:
        raise RunFileError(f"{name} is larger than {_MAX_READ >> 20} MiB, so it is no report of a run")
    return content
