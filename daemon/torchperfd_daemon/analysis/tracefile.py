"""The bytes of a trace file: plain or gzip, read in bounded pieces, as far as they are sound."""

import gzip
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

MAX_BYTES: Final = 8 << 30
_PIECE: Final = 1 << 20
_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Contents:
    """A file's uncompressed bytes, its size on disk, and whether its compression broke off early."""

    data: bytearray
    size: int
    broken: bool


def read(path: Path, max_bytes: int = MAX_BYTES) -> Contents:
    """Return the uncompressed contents of ``path``.

    A file counts as gzip by its first bytes, whatever it is called.

    Args:
        path: The trace file.
        max_bytes: The most uncompressed bytes to hold; a bigger file is refused, not cut.

    Raises:
        NoSuchTargetError: There is no such file.
        TorchperfdError: The file is empty, cannot be read, or is too big.
    """
    try:
        with path.open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            if raw.peek(2)[:2] == _GZIP_MAGIC:
                with gzip.GzipFile(fileobj=raw) as inflated:
                    data, broken = _drain(inflated, path, max_bytes)
            else:
                data, broken = _drain(raw, path, max_bytes)
    except FileNotFoundError:
        raise NoSuchTargetError(f"there is no trace at {path}") from None
    except OSError as error:
        raise TorchperfdError(f"cannot read {path}: {error.strerror or error}") from None
    if not data and not broken:
        raise TorchperfdError(
            f"{path} is empty", "capture again: the export was cut off or the disk was full"
        )
    return Contents(data, size, broken)


def _drain(stream: gzip.GzipFile | io.BufferedReader, path: Path, max_bytes: int) -> tuple[bytearray, bool]:
    data = bytearray()
    while True:
        try:
            # read1, not read: what was inflated before the damage must not be lost with it.
            piece = stream.read1(_PIECE)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return data, True
        if not piece:
            return data, False
        data += piece
        if len(data) > max_bytes:
            raise TorchperfdError(
                f"{path} holds more than {max_bytes:,} bytes of trace", "capture fewer steps or record less"
            )
