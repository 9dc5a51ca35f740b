"""Reads files that other processes may have damaged: any content is decoded, or raises one kind of error."""

import sqlite3
import stat
from mmap import mmap
from pathlib import Path
from typing import TypeVar

import msgspec

from torchperfd_daemon.text import clean_fields

T = TypeVar("T")


class DamagedError(ValueError):
    """A document is not what it should be."""


def decode(document: bytes | str | mmap, kind: type[T]) -> T:
    """Decode a JSON document of any origin.

    Damaged input raises one of several unrelated errors in msgspec: its own, ``UnicodeDecodeError``
    or ``RecursionError``.

    Raises:
        DamagedError: It is no JSON, or not of this kind.
    """
    try:
        return msgspec.json.decode(document, type=kind)
    except (ValueError, RecursionError, OverflowError) as error:
        raise DamagedError(f"not a {kind.__name__}: {error}") from error


def decode_clean(document: bytes, kind: type[T]) -> T:
    """Decode a dataclass of which no text can drive a terminal.

    Raises:
        DamagedError: It is no JSON, or not of this kind.
    """
    record = decode(document, kind)
    clean_fields(record)
    return record


def check_database(path: Path) -> None:
    """Refuse a database that is not a regular file: SQLite would wait on a pipe, and follow a link.

    Raises:
        sqlite3.DatabaseError: Something else has the name.
        OSError: It cannot be examined.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise sqlite3.DatabaseError(f"{path.name} is no regular file")
