"""Reads files of any origin without running anything in them: compressed files, and pickles of plain data.

Files that other processes may have damaged are decoded, or raise one kind of error.
"""

import gzip
import importlib
import io
import lzma
import os
import pickle
import re
import sqlite3
import stat
import zlib
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError
from torchperfd_daemon.object_store import AnyPath
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


_PIECE: Final = 1 << 20

_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
COMPRESSION_MAGIC: Final = (_GZIP, _XZ, _ZSTD)
_MAX_MAGIC: Final = 6


class BrokenCompressionError(Exception):
    """The compressed data is damaged or cut off."""


def decompressed_pieces(raw: io.BufferedReader, most: int) -> Iterator[bytes]:
    """Yield the contents of a file, decompressed, at most ``most`` bytes at a time.

    Raises:
        BrokenCompressionError: The data is damaged; all that could be read before has been yielded.
        TorchperfdError: Nothing here decompresses the format.
        OSError: The file cannot be read.
    """
    stream, damage = _open_decompressed(raw)
    while True:
        try:
            # read1, not read: the bytes decompressed before the damage must not be lost with it.
            piece: bytes = stream.read1(most)
        except damage as error:
            raise BrokenCompressionError(str(error)) from error
        if not piece:
            return
        yield piece


def decompressed_head(raw: io.BufferedReader, most: int) -> bytes:
    """Return the first ``most`` bytes of the contents, or fewer if the data is damaged or ends before.

    Raises:
        TorchperfdError: Nothing here decompresses the format.
        OSError: The file cannot be read.
    """
    found = b""
    try:
        for piece in decompressed_pieces(raw, most):
            found += piece
            if len(found) >= most:
                break
    except BrokenCompressionError:
        pass
    return found[:most]


def contents(path: AnyPath, what: str, max_bytes: int, too_large: str) -> bytes:
    """Return the contents of a file or an object that others may have written, decompressed.

    Of damaged compression, what could be decompressed: it is judged like a file that was cut off.

    Args:
        what: What the file should be, for the messages.
        max_bytes: The most that may be read.
        too_large: The remedy where it holds more.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: It is no regular file, holds more, or cannot be read.
    """
    data = bytearray()
    try:
        with path.open("rb") as file:
            if isinstance(path, Path) and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                remedy = f"copy the {what.split()[-1]} to a file first"
                raise TorchperfdError(f"{path} is no regular file", remedy)
            for piece in decompressed_pieces(file, _PIECE):
                data += piece
                if len(data) > max_bytes:
                    raise TorchperfdError(f"{path} holds more than {max_bytes:,} bytes", too_large)
    except BrokenCompressionError:
        pass
    except FileNotFoundError:
        raise NoSuchTargetError(f"there is no {what} at {path}") from None
    except OSError as error:
        raise TorchperfdError(f"cannot read {path}: {error.strerror or error}") from None
    return bytes(data)


def _open_decompressed(raw: io.BufferedReader) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream of plain bytes, and the errors by which it reports damage."""
    begins = raw.peek(_MAX_MAGIC)[:_MAX_MAGIC]
    if begins.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw), (EOFError, gzip.BadGzipFile, zlib.error)
    if begins.startswith(_XZ):
        return lzma.LZMAFile(raw), (EOFError, lzma.LZMAError)
    if begins.startswith(_ZSTD):
        return _open_zstd(raw)
    return raw, ()


def _open_zstd(raw: io.BufferedReader) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError:
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise TorchperfdError(
                f"{raw.name} is compressed with zstd, which Python reads from 3.14 on",
                "decompress it with `zstd -d`, or install the package zstandard",
            ) from None
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return reader, (EOFError, zstandard.ZstdError)
    return zstd.ZstdFile(raw), (EOFError, zstd.ZstdError)


_PICKLE_MAGIC: Final = 0x80
_PROTOCOLS: Final = range(2, 6)
_STOP: Final = 0x2E
_LONG_BINPUT: Final = 0x72
# After an operation a FRAME may follow, which only announces how many bytes come next.
_FRAME: Final = rb"\x95.{8}"
_LONG: Final = rb"\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"
_INT: Final = rb"(?:K.|M..|J.{4}|" + _LONG + rb")"
_INT_PART: Final = _INT + rb"(?:" + _FRAME + rb")?+"
# A run of operations, as one expression, since a snapshot has millions. In this order: a tuple of any length;
# a number, or a tuple of up to three; MEMOIZE, None, booleans, marks, empty containers and what fills them;
# BINGET and BINPUT; LONG_BINGET; BINFLOAT. Tuples hold whole numbers only: Python hashes a nested tuple by
# recursion, and does not come to an end with one that holds another many times.
_RUN: Final = re.compile(
    rb"(?:\((?:%(part)s)*+t|%(part)s(?:\x85|%(part)s(?:\x86|%(part)s\x87))?+"
    rb"|[\x94N\x88\x89()\]}aeus]|[hq].|j.{4}|G.{8}|%(frame)s)*+" % {b"part": _INT_PART, b"frame": _FRAME},
    re.DOTALL,
)
# The same, without the BINGET and LONG_BINGET directly before a text, a tuple or another of them.
_RUN_BETWEEN_TEXTS: Final = re.compile(
    rb"(?:\((?:%(part)s)*+t|%(part)s(?:\x85|%(part)s(?:\x86|%(part)s\x87))?+"
    rb"|[\x94N\x88\x89()\]}aeus]|q.|(?:h.|j.{4})(?=[KMJ\x8aN\x88\x89()\]}aeusG])|G.{8}|%(frame)s)*+"
    % {b"part": _INT_PART, b"frame": _FRAME},
    re.DOTALL,
)
_PUT: Final = re.compile(rb"(?:" + _FRAME + rb")?+(?:q(.)|r(.{4})|(\x94))(?:" + _FRAME + rb")?+", re.DOTALL)
_ANY: Final = re.compile(rb"\x94|" + _INT + rb"|[hq].|[jr].{4}|G.{8}|" + _FRAME + rb"|.", re.DOTALL)
_MEMOIZE: Final = b"\x94"
_GETS: Final = {0x68: 1, 0x6A: 4}
# TUPLE1, TUPLE2, TUPLE3, with the number of their items.
_SHORT_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}
# What may follow a tuple of texts: a text, BINGET, LONG_BINGET, APPEND, APPENDS, SETITEM, SETITEMS.
_AFTER_TUPLE: Final = frozenset(b"\x8cX\x8dhjaesu")
# Bytes of the longest operation of a fixed length.
_MAX_OPERATION: Final = 11
_FIRST_WITH_MEMOIZE: Final = 4
# Operations with a length of so many bytes: texts and bytes.
_COUNTED: Final = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8}
# GLOBAL, STACK_GLOBAL, INST, OBJ, REDUCE, NEWOBJ, NEWOBJ_EX, BUILD, EXT1, EXT2, EXT4, PERSID, BINPERSID.
_CODE: Final = frozenset(b"c\x93ioR\x81\x92b\x82\x83\x84PQ")
_CODE_REFUSED: Final = "this file contains code; torchperfd reads only plain data"
_CODE_REMEDY: Final = "do not load it with pickle unless you trust its author"


def is_pickle(head: bytes) -> bool:
    """Return whether the first two bytes of a file are those of a binary pickle."""
    return len(head) > 1 and head[0] == _PICKLE_MAGIC and head[1] in _PROTOCOLS


def load_plain(data: bytes, written_by: str = "torch.cuda.memory._dump_snapshot") -> object:
    """Return what a binary pickle of plain data holds; see the module.

    Memory and time are proportional to ``len(data)``.

    Args:
        written_by: What writes such files, for the message about one that is something else.

    Raises:
        TorchperfdError: It is cut off or damaged, holds anything else, or this process has too little memory.
    """
    try:
        _check_operations(data)
    except _DamagedError as error:
        raise _damaged(str(error), written_by) from None
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise TorchperfdError("too little memory to read it", "read it on a machine with more") from None
    except (
        pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError
    ) as error:  # fmt: skip
        # Such as a dict whose key is a list, or a frame of 2**63 bytes: no writer of pickles makes those.
        raise _damaged(str(error), written_by) from None


class _DamagedError(Exception):
    """The operations are those of no such file."""


class _PlainUnpickler(pickle.Unpickler):
    """The second defence: the operations that need these are refused before."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)

    def persistent_load(self, pid: object) -> NoReturn:
        raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)


def _check_operations(data: bytes) -> None:
    if not is_pickle(data[:2]):
        raise _DamagedError("it is no binary pickle")
    position = 2
    texts: _TextTuples | None = None
    while True:
        run = (_RUN if texts is None else _RUN_BETWEEN_TEXTS).match(data, position)
        if run is not None:
            if texts is not None:
                texts.passed(data, position, run.end())
            position = run.end()
        if position >= len(data):
            raise _cut_off()
        operation = data[position]
        if operation == _STOP:
            return
        if (width := _COUNTED.get(operation)) is not None:
            position += 1 + width
            length = int.from_bytes(data[position - width : position], "little")
            if length > len(data) - position:
                raise _cut_off()
            position += length
            if texts is not None:
                position = texts.pushed_text(data, position)
        elif operation in _GETS and texts is not None:
            position = texts.pushed_from_memo(data, position)
        elif operation in _SHORT_TUPLES:
            if texts is None:
                # Only now: a snapshot has millions of operations and no such tuple.
                texts, position = _TextTuples(data[1]), 2
            else:
                position = texts.made_tuple(data, position)
        elif operation == _LONG_BINPUT:
            # The unpickler reserves a table up to the largest number; real ones count from 0.
            if int.from_bytes(data[position + 1 : position + 5], "little") > position:
                raise _DamagedError("a number of its memo is too large")
            position += 5
        elif operation in _CODE:
            raise TorchperfdError(_CODE_REFUSED, _CODE_REMEDY)
        elif _needs_more(operation, len(data) - position):
            raise _cut_off()
        else:
            raise _DamagedError(f"such a file has no pickle operation 0x{operation:02x}")


class _TextTuples:
    """Checks tuples of up to three texts: none may hold another of them.

    Their items are the last operations before them: a text, or a value from the memo that is no such tuple.
    """

    def __init__(self, protocol: int) -> None:
        self._counts_memo = protocol >= _FIRST_WITH_MEMOIZE
        self._memoized = 0
        self._tuples = set[int]()
        # Whether each of the values pushed last is a tuple.
        self._pushed: list[bool] = []

    def passed(self, data: bytes, begin: int, end: int) -> None:
        """Note a run of operations that is none of this."""
        if end > begin:
            self._pushed.clear()
            if self._counts_memo:
                self._memoized += _ANY.findall(data, begin, end).count(_MEMOIZE)

    def pushed_text(self, data: bytes, position: int) -> int:
        """Note a text that ends at ``position``; return the position after its place in the memo."""
        self._pushed.append(False)
        return self._put(data, position, is_tuple=False)

    def pushed_from_memo(self, data: bytes, position: int) -> int:
        """Note the BINGET or LONG_BINGET at ``position``; return the position after it."""
        end = position + 1 + _GETS[data[position]]
        self._pushed.append(int.from_bytes(data[position + 1 : end], "little") in self._tuples)
        return end

    def made_tuple(self, data: bytes, position: int) -> int:
        """Check the tuple that is made at ``position``; return the position after its place in the memo.

        Raises:
            _DamagedError: An item is no text.
        """
        count = _SHORT_TUPLES[data[position]]
        if len(self._pushed) < count or any(self._pushed[-count:]):
            raise _DamagedError("a tuple holds more than texts")
        self._pushed[-count:] = [True]
        position = self._put(data, position + 1, is_tuple=True)
        # Otherwise it could be put into the memo later, unseen.
        if data[position : position + 1] and data[position] not in _AFTER_TUPLE:
            raise _DamagedError("a tuple of texts is no item of a dict or list")
        return position

    def _put(self, data: bytes, position: int, *, is_tuple: bool) -> int:
        if (put := _PUT.match(data, position)) is None:
            return position
        number = put[1] or put[2]
        place = self._memoized if number is None else int.from_bytes(number, "little")
        self._memoized += put[3] is not None
        if place > position:
            raise _DamagedError("a number of its memo is too large")
        if is_tuple:
            self._tuples.add(place)
        return put.end()


def _needs_more(operation: int, left: int) -> bool:
    """Return whether an operation at the end of the file would be plain if the file went on."""
    return left <= _MAX_OPERATION and operation in b"KMJ\x8ahqjG\x95"


def _cut_off() -> TorchperfdError:
    return TorchperfdError("the file is cut off", "write it again: the disk was full or the process ended")


def _damaged(why: str, written_by: str) -> TorchperfdError:
    return TorchperfdError(f"the file is damaged or no output of {written_by}: {why}", "write it again")
