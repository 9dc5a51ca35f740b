"""Reads the sound bytes of a trace file, plain or compressed, in bounded pieces."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torchperfd_daemon import compression
from torchperfd_daemon.errors import NoSuchTargetError, TorchperfdError

MAX_BYTES: Final = 8 << 30
_PIECE: Final = 1 << 19


class TraceFile:
    """One file, read once.

    Args:
        max_bytes: The most uncompressed bytes to hand out; a bigger file is refused, not cut.

    Attributes:
        size: Bytes on disk, known once the first piece is out.
        broken: The compression broke off before the file's end, known once the last piece is out.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.size = 0
        self.broken = False
        self._max_bytes = max_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the uncompressed contents, half a mebibyte at a time at most.

        Raises:
            NoSuchTargetError: There is no such file.
            TorchperfdError: The file is empty, cannot be read or decompressed, or is too big.
        """
        try:
            with self.path.open("rb") as raw:
                self.size = os.fstat(raw.fileno()).st_size
                yield from self._drain(raw)
        except FileNotFoundError:
            raise NoSuchTargetError(f"there is no trace at {self.path}") from None
        except OSError as error:
            raise TorchperfdError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _drain(self, raw: io.BufferedReader) -> Iterator[bytes]:
        total = 0
        try:
            for piece in compression.pieces(raw, _PIECE):
                total += len(piece)
                if total > self._max_bytes:
                    raise TorchperfdError(
                        f"{self.path} holds more than {self._max_bytes:,} bytes of trace",
                        "capture fewer steps or record less",
                    )
                yield piece
        except compression.BrokenCompressionError:
            self.broken = True
            return
        if not total:
            raise TorchperfdError(
                f"{self.path} is empty", "capture again: the export was cut off or the disk was full"
            )
