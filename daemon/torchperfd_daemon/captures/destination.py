"""The destination of uploads, a bucket or a mounted share, and the marker file that holds its URL."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final
from urllib.parse import unquote

from torchperfd.model.formatting import one_line
from torchperfd_daemon.captures import folder
from torchperfd_daemon.errors import TorchperfdError, UsageError, explained
from torchperfd_daemon.object_store import (
    allows_http,
    cause,
    import_obstore,
    missing_obstore,
    open_store,
    split_url,
)

if TYPE_CHECKING:
    from obstore.store import LocalStore, ObjectStore


# A part in flight is in memory: two files at once with two parts each are 20 MiB, and as much is being read.
_PART_BYTES: Final = 5 * 2**20
_PARTS_AT_ONCE: Final = 2
_MAX_PARTS: Final = 9000  # of the 10,000 that S3 takes
_SHA256: Final = "sha256"


class UploadError(TorchperfdError):
    """The destination did not take a file this time."""


class ChangedError(TorchperfdError):
    """A file does not match its manifest."""


class Destination:
    """Where captures and the lake go: files by their key, below one prefix.

    Credentials, region and endpoint come from the environment, as obstore reads it.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, or ``file:///path`` of a directory that is there.
        environment: Where an ``http`` endpoint may be named.
        keeps_connections: For thousands of small objects in a row. Captures are hours apart: a connection
            kept open is one more that breaks.

    Attributes:
        path: The directory; None for a bucket.

    Raises:
        UsageError: It is no such URL, or the environment names an endpoint that cannot be used.
        TorchperfdError: obstore is not installed.
    """

    def __init__(
        self, url: str, environment: Mapping[str, str] = os.environ, *, keeps_connections: bool = False
    ) -> None:
        parts = split_url(url)
        self.url = url.rstrip("/")
        self.path = Path(unquote(parts.path)) if parts.scheme == "file" else None
        self._local: type[LocalStore] = import_obstore().store.LocalStore
        self._store: ObjectStore | None = None
        if self.path is None:
            self._store = open_store(
                self.url,
                environment,
                # The store compares each part with its SHA-256 as it comes in.
                config={"checksum_algorithm": _SHA256} if parts.scheme == "s3" else None,
                client_options=None if keeps_connections else {"pool_max_idle_per_host": "0"},
            )

    def check_apart(self, directory: Path) -> None:
        """Refuse a destination within the captures directory.

        Raises:
            UsageError: The destination is within the captures directory, or is it.
        """
        if self.path is not None and self.path.resolve().is_relative_to(directory.resolve()):
            raise UsageError(f"{self.url} is in the captures directory", "upload to another directory")

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        """Upload a file unless the destination has it already, and verify it afterwards.

        Args:
            key: Below the prefix.
            file: Open for reading.
            size: Bytes that it has to have.
            sha256: Its expected SHA-256, in hexadecimal digits. A file that differs is not kept.

        Returns:
            Bytes that were sent.

        Raises:
            ChangedError: The file is another.
            UploadError: The destination did not take it.
        """
        import obstore

        if file.seek(0, os.SEEK_END) != size:
            raise ChangedError(f"{key} does not have the size in its manifest")
        file.seek(0)
        store = await self.opened()
        with self.translating(key):
            if await self._holds(store, key, size, sha256):
                return 0
            attributes = None if self.path is not None else {_SHA256: sha256}
            if size <= _PART_BYTES:
                # Empty files too: there is no multipart upload of nothing.
                content = b"".join([piece async for piece in _pieces(key, file, sha256, _PART_BYTES)])
                await obstore.put_async(store, key, content, attributes=attributes, use_multipart=False)
            else:
                part = max(_PART_BYTES, -(-size // _MAX_PARTS))
                await obstore.put_async(
                    store,
                    key,
                    _pieces(key, file, sha256, part),
                    attributes=attributes,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            if not await self._holds(store, key, size, sha256):
                raise UploadError(
                    f"{self.url} holds another content as {key} than was sent", "check the store"
                )
        return size

    async def opened(self) -> "ObjectStore":
        """Return the store.

        Raises:
            UploadError: The directory is not there.
        """
        if self.path is None:
            assert self._store is not None
            return self._store
        # Opened each time and never created: an unmounted share is a directory of the local disk.
        if not await asyncio.to_thread(self.path.is_dir):
            raise UploadError(f"{self.path} does not exist", "mount or create it")
        return self._local(prefix=self.path)

    async def _holds(self, store: "ObjectStore", key: str, size: int, sha256: str) -> bool:
        """Return whether the destination has just this file.

        Object stores keep the digest beside it, and have compared the parts with theirs; what a share
        has is read.
        """
        import obstore

        try:
            found = await obstore.get_async(store, key, options={"head": self.path is None})
        except FileNotFoundError:
            return False
        if found.meta["size"] != size:
            return False
        if self.path is None:
            return found.attributes.get(_SHA256) == sha256
        digest = hashlib.sha256()
        async for piece in found.stream(_PART_BYTES):
            await asyncio.to_thread(digest.update, piece)
        return digest.hexdigest() == sha256

    @contextlib.contextmanager
    def translating(self, key: str) -> Iterator[None]:
        """Turn obstore's errors into ours."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise UploadError(
                f"{self.url} refuses {key}: {cause(error)}",
                "check the credentials in the daemon's environment, and their permissions",
            ) from error
        except FileNotFoundError as error:
            raise UploadError(
                f"{self.url} has no bucket or directory for {key}: {cause(error)}",
                "create the bucket, or correct the URL",
            ) from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise UploadError(
                f"{self.url} did not take {key}: {cause(error)}", "check that this node can reach it"
            ) from error


def check_destination(url: str, environment: Mapping[str, str] = os.environ) -> None:
    """Validate a destination without loading obstore, which another process will use.

    Raises:
        UsageError: As by :class:`Destination`.
        TorchperfdError: obstore is not installed.
    """
    if split_url(url).scheme == "s3":
        allows_http(environment)
    if importlib.util.find_spec("obstore") is None:
        raise missing_obstore()


async def _pieces(key: str, file: BinaryIO, sha256: str, size: int) -> AsyncIterator[bytes]:
    """Yield a file in pieces of a size; fail at its end if its SHA-256 differs."""
    digest = hashlib.sha256()

    def read() -> bytes:
        piece = file.read(size)
        digest.update(piece)
        return piece

    while piece := await asyncio.to_thread(read):
        yield piece
    if digest.hexdigest() != sha256:
        raise ChangedError(f"{key} does not have the SHA-256 in its manifest")


_MARKER: Final = ".uploads-to"
_MAX_MARKER_BYTES: Final = 2048


def write_upload_marker(directory: Path, url: str) -> None:
    """Write the marker, for `captures list` and `captures upload`, which do not ask the daemon.

    Raises:
        TorchperfdError: It cannot be written.
    """
    with explained(f"cannot write to {directory}", "choose another with --captures-dir"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.opened(directory) as held:
            folder.write(held, _MARKER, url.encode() + b"\n")


def read_upload_marker(directory: Path) -> str:
    """Return the URL that captures are uploaded to; empty when they are not.

    Where a directory is open to all, so is this name: only a marker of its owner's, root's or our own counts.
    """
    with (
        contextlib.suppress(OSError, UnicodeDecodeError),
        folder.opened(directory) as held,
        open(folder.open_file(held, _MARKER), "rb") as file,  # noqa: PTH123
    ):
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid(), os.fstat(held).st_uid):
            return one_line(file.read(_MAX_MARKER_BYTES).decode().strip(), _MAX_MARKER_BYTES)
    return ""


def remove_upload_marker(directory: Path) -> None:
    """Remove the marker: captures are no longer uploaded."""
    with contextlib.suppress(OSError):
        (directory / _MARKER).unlink()
