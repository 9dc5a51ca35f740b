"""The destination: a bucket, or a mounted share, that captures are uploaded to."""

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final
from urllib.parse import SplitResult, unquote, urlsplit

from torchperfd_daemon.errors import TorchperfdError, UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SCHEMES: Final = ("s3", "gs", "az", "file")
_WRITE_IT: Final = "write it like s3://bucket/prefix, gs://bucket, az://container or file:///mnt/share"
_PATH: Final = re.compile(r"[^\x00-\x1f\x7f\\?#]{0,512}")

# A part in flight is in memory: two files at once with two parts each are 20 MiB, and as much is being read.
_PART_BYTES: Final = 5 * 2**20
_PARTS_AT_ONCE: Final = 2
_MOST_PARTS: Final = 9000  # of the 10,000 that S3 takes
_SHA256: Final = "sha256"
# What stays is for the next look to try again.
_RETRIES: Final = 2
_RETRY_FOR: Final = timedelta(seconds=20)
_REQUEST_TIMEOUT: Final = "120s"
_CONNECT_TIMEOUT: Final = "10s"

_MESSAGE: Final = re.compile(r"<Message>([^<]{1,200})</Message>")
_PRIVATE_NAME: Final = re.compile(r"[^.]+|.+\.(local|internal|svc)|.+\.svc\.cluster\.local", re.IGNORECASE)


class UploadError(TorchperfdError):
    """The destination did not take a file this time."""


class ChangedError(TorchperfdError):
    """A file is not what its manifest says."""


class Destination:
    """Where captures go: files by their capture's id and their name, below one prefix.

    Credentials, region and endpoint come from the environment, as obstore reads it.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, or ``file:///path`` of a directory that is there.
        environment: Where an ``http`` endpoint may be named.

    Raises:
        UsageError: It is no such URL, or the environment names an endpoint that cannot be used.
        TorchperfdError: obstore is not installed.
    """

    def __init__(self, url: str, environment: Mapping[str, str] = os.environ) -> None:
        parts = _split(url)
        self.url = url.rstrip("/")
        self._path = Path(unquote(parts.path)) if parts.scheme == "file" else None
        try:
            import obstore.store
        except ImportError as error:
            raise TorchperfdError(
                "uploading captures needs obstore", "`pip install 'torchperfd[s3]'`"
            ) from error
        self._local = obstore.store.LocalStore
        self._store: ObjectStore | None = None
        if self._path is None:
            allow_http = parts.scheme == "s3" and _allow_http(environment)
            try:
                self._store = obstore.store.from_url(
                    self.url,
                    # The store compares each part with its SHA-256 as it comes in.
                    config={"checksum_algorithm": _SHA256} if parts.scheme == "s3" else None,
                    client_options={
                        "connect_timeout": _CONNECT_TIMEOUT,
                        "timeout": _REQUEST_TIMEOUT,
                        # Captures are hours apart: a connection kept open is one more that breaks.
                        "pool_max_idle_per_host": "0",
                        **({"allow_http": True} if allow_http else {}),
                    },
                    retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_FOR},
                )
            except (obstore.exceptions.BaseError, ValueError, OSError) as error:
                raise UsageError(f"cannot upload to {self.url}: {_cause(error)}", _WRITE_IT) from error

    def check_apart(self, directory: Path) -> None:
        """Refuse to upload captures to where they are.

        Raises:
            UsageError: The destination is within the captures directory, or is it.
        """
        if self._path is not None and self._path.resolve().is_relative_to(directory.resolve()):
            raise UsageError(f"{self.url} is in the captures directory", "upload to another place")

    async def put(self, key: str, file: BinaryIO, size: int, sha256: str) -> int:
        """Upload a file unless it is there already, and see that it is there then.

        Args:
            key: Below the prefix.
            file: Open for reading.
            size: Bytes that it has to have.
            sha256: What it has to be, in hexadecimal digits. Nothing is left of what is not.

        Returns:
            Bytes that were sent.

        Raises:
            ChangedError: The file is another.
            UploadError: The destination did not take it.
        """
        import obstore

        if file.seek(0, os.SEEK_END) != size:
            raise ChangedError(f"{key} has another size than its manifest says")
        file.seek(0)
        store = await self._opened()
        with self._translating(key):
            if await self._holds(store, key, size, sha256):
                return 0
            attributes = None if self._path is not None else {_SHA256: sha256}
            if size <= _PART_BYTES:
                # Empty files too: there is no multipart upload of nothing.
                content = b"".join([piece async for piece in _pieces(key, file, sha256, _PART_BYTES)])
                await obstore.put_async(store, key, content, attributes=attributes, use_multipart=False)
            else:
                part = max(_PART_BYTES, -(-size // _MOST_PARTS))
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
                    f"{self.url} holds something else as {key} than was sent", "look at the store"
                )
        return size

    async def _opened(self) -> "ObjectStore":
        if self._path is None:
            assert self._store is not None
            return self._store
        # Each time anew, and never made: a share that is not mounted is a directory of this disk.
        if not await asyncio.to_thread(self._path.is_dir):
            raise UploadError(f"{self._path} is not there", "mount or make it")
        return self._local(prefix=self._path)

    async def _holds(self, store: "ObjectStore", key: str, size: int, sha256: str) -> bool:
        """Return whether the destination has just this file.

        Object stores keep the digest beside it, and have compared the parts with theirs; what a share
        has is read.
        """
        import obstore

        try:
            found = await obstore.get_async(store, key, options={"head": self._path is None})
        except FileNotFoundError:
            return False
        if found.meta["size"] != size:
            return False
        if self._path is None:
            return found.attributes.get(_SHA256) == sha256
        digest = hashlib.sha256()
        async for piece in found.stream(_PART_BYTES):
            await asyncio.to_thread(digest.update, piece)
        return digest.hexdigest() == sha256

    @contextlib.contextmanager
    def _translating(self, key: str) -> Iterator[None]:
        """Turn obstore's errors into ours."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise UploadError(
                f"{self.url} refuses {key}: {_cause(error)}",
                "look at the credentials in the daemon's environment, and what they are allowed",
            ) from error
        except FileNotFoundError as error:
            raise UploadError(
                f"{self.url} has no place for {key}: {_cause(error)}",
                "make the bucket, or correct --captures-upload",
            ) from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise UploadError(
                f"{self.url} did not take {key}: {_cause(error)}", "see that it can be reached from this node"
            ) from error


async def _pieces(key: str, file: BinaryIO, sha256: str, size: int) -> AsyncIterator[bytes]:
    """Yield a file in pieces of a size; fail at its end if it is another than was said."""
    digest = hashlib.sha256()

    def read() -> bytes:
        piece = file.read(size)
        digest.update(piece)
        return piece

    while piece := await asyncio.to_thread(read):
        yield piece
    if digest.hexdigest() != sha256:
        raise ChangedError(f"{key} has another SHA-256 than its manifest says")


def _split(url: str) -> SplitResult:
    """Take a URL apart.

    Raises:
        UsageError: It is none of a destination.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise UsageError(f"{url[:80]!r} is no URL: {error}", _WRITE_IT) from error
    # Python drops control characters from a URL where others do not.
    if parts.scheme not in _SCHEMES or not url.startswith(f"{parts.scheme}://") or not url.isprintable():
        raise UsageError(f"{url[:80]!r} is no place to upload to", _WRITE_IT)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # It is logged and shown, and credentials are neither.
        raise UsageError(
            f"the {parts.scheme} URL to upload to has more than a place in it",
            f"{_WRITE_IT}, and give credentials by the environment",
        )
    is_place = host in ("", "localhost") and parts.path.strip("/") if parts.scheme == "file" else host
    if not is_place or not _PATH.fullmatch(parts.path) or ".." in parts.path.split("/"):
        raise UsageError(f"{url[:80]!r} names no bucket or directory", _WRITE_IT)
    return parts


def _allow_http(environment: Mapping[str, str]) -> bool:
    """Return whether to speak plain HTTP to the S3 endpoint that the environment names.

    Raises:
        UsageError: It is beyond what is private, and nobody has said that this is meant.
    """
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    if not endpoint.lower().startswith("http://"):
        return False
    host = urlsplit(endpoint).hostname or ""
    if environment.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true") or _is_private(host):
        return True
    raise UsageError(
        f"traces would go to {host} unencrypted", "use an https endpoint, or set AWS_ALLOW_HTTP=true"
    )


def _is_private(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _PRIVATE_NAME.fullmatch(host) is not None
    return address.is_private or address.is_loopback


def _cause(error: Exception) -> str:
    """Return what an error of obstore's says, without the pages that it adds to it."""
    text = str(error).partition("\n\nDebug source")[0]
    message = _MESSAGE.search(text)
    words = message[1] if message else text.rpartition(" - ")[2]
    return "".join(each if each.isprintable() else " " for each in words)[:200].strip(" :")
