"""The kernel's small text files: reading them, and the forms that several collectors meet."""

import errno
import functools
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHUNK: Final = 1 << 16
"""Bytes that are read at once; the kernel's files on a process have fewer."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
# More than any kernel supports: what claims to be a larger number is damaged.
_MAX_CPUS: Final = 1 << 16
# A process may have a million descriptors, and have them looked through again and again.
_MAX_DESCRIPTORS: Final = 1 << 16


def read(path: str | Path) -> str:
    """Return a file's text; a third of the cost of ``Path.read_text``, and these are read every second.

    Raises:
        OSError: It is not there, or not for us.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, CHUNK):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")


def open_memory_file(process: Path, name: str, flags: int) -> int | None:
    """Open a file in memory that a process has among its descriptors, by name; None when it has none.

    Nothing that the process can put in its place is opened. A link's text proves nothing: a FIFO or a
    file of FUSE can have any path, and opening it, or even asking for its size, would wait for that process.

    Args:
        process: Its directory in procfs.
        name: As it was given to ``memfd_create``.
        flags: As :func:`os.open` takes them.

    Raises:
        OSError: The process is gone, or not for us.
    """
    link = f"/memfd:{name} (deleted)"
    with os.scandir(process / "fd") as entries:
        for entry in itertools.islice(entries, _MAX_DESCRIPTORS):
            try:
                if os.readlink(entry.path) != link:  # noqa: PTH115 - a process may have many thousands
                    continue
                # It only names the file, and waits for no one.
                handle = os.open(entry.path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # closed in between
            try:
                if _mount_of(handle) == _memory_mount():
                    return os.open(f"/proc/self/fd/{handle}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
            finally:
                os.close(handle)
    return None


def _mount_of(descriptor: int) -> str:
    """Return the id of the mount that a descriptor's file is on, as the kernel keeps it.

    Raises:
        OSError: The kernel does not report it; files that other processes have open then stay unread.
    """
    mount = parse_table(read(f"/proc/self/fdinfo/{descriptor}")).get("mnt_id")
    if mount is None:
        raise OSError(errno.ENOTSUP, "the kernel does not report which mount a file is on")
    return mount


@functools.cache
def _memory_mount() -> str:
    """Return the id of the kernel's own mount, which has all files of ``memfd_create`` and no others."""
    file = os.memfd_create("torchperfd-probe", os.MFD_CLOEXEC)
    try:
        return _mount_of(file)
    finally:
        os.close(file)


def parse_table(text: str, separator: str = ":") -> dict[str, str]:
    """Return the lines ``name: value`` of files like ``status`` and ``meminfo``; others are skipped."""
    table = {}
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found:
            table[name.strip()] = value.strip()
    return table


def parse_lines(text: str, *names: str) -> list[str]:
    """Return the values of some lines ``name: value`` of a file that has many more.

    Raises:
        ValueError: It has no such line.
    """
    values = []
    for name in names:
        begin = 0 if text.startswith(f"{name}:") else text.index(f"\n{name}:") + 1
        end = text.find("\n", begin)
        values.append(text[begin + len(name) + 1 : end if end >= 0 else None].strip())
    return values


@functools.lru_cache(maxsize=256)
def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a list like ``0-3,8``; an empty text is no CPU.

    Raises:
        ValueError: It is no such list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        low = int(first)
        high = int(last) if dash else low
        if not 0 <= low <= high < _MAX_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The parsed ``/proc/<pid>/stat``.

    Attributes:
        parent: Process id of the parent.
        cpu_seconds: User and system time of the process and of its children that were waited for.
        own_cpu_seconds: The same of its own threads only.
        threads: How many threads it has.
        start_ticks: When it started, in clock ticks since boot.
        resident_pages: Pages in memory.
    """

    parent: int
    cpu_seconds: float
    own_cpu_seconds: float
    threads: int
    start_ticks: int
    resident_pages: int


def parse_stat(text: str) -> ProcessStat:
    """Read ``/proc/<pid>/stat``.

    Raises:
        ValueError: It is damaged.
    """
    # The command's name, field 2, may hold spaces and parentheses: count from its end.
    fields = text.rpartition(")")[2].split(None, 22)
    if len(fields) < 22:
        raise ValueError(f"{text[:80]!r} is no process's stat")
    return ProcessStat(
        parent=int(fields[1]),
        cpu_seconds=sum(map(int, fields[11:15])) / _TICKS_PER_SECOND,
        own_cpu_seconds=sum(map(int, fields[11:13])) / _TICKS_PER_SECOND,
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        resident_pages=int(fields[21]),
    )
