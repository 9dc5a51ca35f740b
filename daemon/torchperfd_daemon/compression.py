"""Reads compressed files in bounded pieces: gzip, xz, and zstd where Python or a package has it.

A file is compressed if its first bytes are those of a format, whatever its name.
"""

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, Final

from torchperfd_daemon.errors import TorchperfdError

_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
MAGIC: Final = (_GZIP, _XZ, _ZSTD)
_LONGEST_MAGIC: Final = 6


class BrokenCompressionError(Exception):
    """The compressed data is damaged or cut off."""


def pieces(raw: io.BufferedReader, most: int) -> Iterator[bytes]:
    """Yield the contents of a file, decompressed, at most ``most`` bytes at a time.

    Raises:
        BrokenCompressionError: The data is damaged; all that could be read before has been yielded.
        TorchperfdError: Nothing here decompresses the format.
        OSError: The file cannot be read.
    """
    stream, damage = _opened(raw)
    while True:
        try:
            # read1, not read: the bytes decompressed before the damage must not be lost with it.
            piece: bytes = stream.read1(most)
        except damage as error:
            raise BrokenCompressionError(str(error)) from error
        if not piece:
            return
        yield piece


def head(raw: io.BufferedReader, most: int) -> bytes:
    """Return the first ``most`` bytes of the contents, or fewer if the data is damaged or ends before.

    Raises:
        TorchperfdError: Nothing here decompresses the format.
        OSError: The file cannot be read.
    """
    found = b""
    try:
        for piece in pieces(raw, most):
            found += piece
            if len(found) >= most:
                break
    except BrokenCompressionError:
        pass
    return found[:most]


def _opened(raw: io.BufferedReader) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream of plain bytes, and the errors by which it reports damage."""
    begins = raw.peek(_LONGEST_MAGIC)[:_LONGEST_MAGIC]
    if begins.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw), (EOFError, gzip.BadGzipFile, zlib.error)
    if begins.startswith(_XZ):
        return lzma.LZMAFile(raw), (EOFError, lzma.LZMAError)
    if begins.startswith(_ZSTD):
        return _zstd(raw)
    return raw, ()


def _zstd(raw: io.BufferedReader) -> tuple[Any, tuple[type[Exception], ...]]:
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
