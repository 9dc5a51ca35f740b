"""Object stores by URL (S3, GCS, Azure), and their objects as paths that are read in place.

Credentials, region and endpoint come from the environment or from the cloud instance, as obstore reads them.
"""

import contextlib
import functools
import io
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlsplit

from torchperfd_daemon.errors import NoSuchTargetError, NotAllowedError, TorchperfdError, UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from obstore.store import ObjectStore

_SCHEMES: Final = ("s3", "gs", "az", "file")
_URL_FORMS: Final = "write it like s3://bucket/prefix, gs://bucket, az://container or file:///mnt/share"
_PATH: Final = re.compile(r"[^\x00-\x1f\x7f\\?#]{0,512}")
# What needs no escape in a key, for a person who copies it.
_UNESCAPED: Final = "/:=+,@"
_RETRIES: Final = 2
_RETRY_FOR: Final = timedelta(seconds=20)
_REQUEST_TIMEOUT: Final = "120s"
_CONNECT_TIMEOUT: Final = "10s"
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,200})</Message>")
_PRIVATE_NAME: Final = re.compile(r"[^.]+|.+\.(local|internal|svc)|.+\.svc\.cluster\.local", re.IGNORECASE)


def import_obstore() -> "ModuleType":
    """Return obstore with its stores.

    Raises:
        TorchperfdError: It is not installed, or cannot be loaded.
    """
    try:
        import obstore.store
    except ModuleNotFoundError as error:
        raise missing_obstore() from error
    except ImportError as error:
        raise TorchperfdError(
            f"obstore cannot be loaded: {error}", "allow more memory (--worker-memory), or install it again"
        ) from error
    return obstore


def missing_obstore() -> TorchperfdError:
    """Return the error where obstore is not installed."""
    return TorchperfdError("a URL of an object store needs obstore", "`pip install obstore`")


def split_url(url: str) -> SplitResult:
    """Take the URL of a bucket, a prefix or a directory apart.

    Raises:
        UsageError: It is none.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as error:
        raise UsageError(f"{url[:80]!r} is no URL: {error}", _URL_FORMS) from error
    # Python drops control characters from a URL where others do not.
    if parts.scheme not in _SCHEMES or not url.startswith(f"{parts.scheme}://") or not url.isprintable():
        raise UsageError(f"{url[:80]!r} is no URL of an object store", _URL_FORMS)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # It is logged and shown, and credentials are neither.
        raise UsageError(
            f"the {parts.scheme} URL has more than a bucket and a prefix",
            f"{_URL_FORMS}, and set credentials in the environment",
        )
    is_place = host in ("", "localhost") and parts.path.strip("/") if parts.scheme == "file" else host
    if not is_place or not _PATH.fullmatch(parts.path) or ".." in parts.path.split("/"):
        raise UsageError(f"{url[:80]!r} names no bucket or directory", _URL_FORMS)
    return parts


def open_store(
    url: str,
    environment: Mapping[str, str] = os.environ,
    config: Any = None,
    client_options: Mapping[str, Any] | None = None,
) -> "ObjectStore":
    """Return the store of a bucket, below the URL's prefix; nothing is requested yet.

    Args:
        environment: Where an ``http`` endpoint may be named.
        config: Of the store, and ``client_options`` of its HTTP client, in obstore's words.

    Raises:
        UsageError: It cannot be one, or the environment names an endpoint that cannot be used.
        TorchperfdError: obstore is not installed.
    """
    obstore = import_obstore()
    allow_http = urlsplit(url).scheme == "s3" and allows_http(environment)
    try:
        found: ObjectStore = obstore.store.from_url(
            url,
            config=config,
            client_options={
                "connect_timeout": _CONNECT_TIMEOUT,
                "timeout": _REQUEST_TIMEOUT,
                **(client_options or {}),
                **({"allow_http": True} if allow_http else {}),
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_FOR},
        )
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        raise UsageError(f"cannot use {url}: {cause(error)}", _URL_FORMS) from error
    return found


def allows_http(environment: Mapping[str, str]) -> bool:
    """Return whether to speak plain HTTP to the S3 endpoint that the environment names.

    Raises:
        UsageError: The endpoint is public, and AWS_ALLOW_HTTP does not allow plain HTTP.
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


def cause(error: Exception) -> str:
    """Return the cause in an error of obstore's, without the long debug output that follows it."""
    text = str(error).partition("\n\nDebug source")[0]
    message = _MESSAGE.search(text)
    found = message[1] if message else text.rpartition(" - ")[2]
    return "".join(each if each.isprintable() else " " for each in found)[:200].strip(" :")


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object, or a prefix with objects, that is used like a ``Path`` for reading; it pickles.

    Attributes:
        root: The URL of its bucket.
        key: Its name in the bucket; of a prefix without a slash at the end, empty for the whole bucket.
        is_prefix: Whether it is what a directory is in a file system.
    """

    root: str
    key: str
    is_prefix: bool = False

    def __str__(self) -> str:
        return f"{self.root}/{quote(self.key, safe=_UNESCAPED)}"

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.root, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The prefix that it lies in."""
        return ObjectPath(self.root, self.key.rpartition("/")[0], is_prefix=True)

    def is_dir(self) -> bool:
        """Return whether it is a prefix."""
        return self.is_prefix

    def is_file(self) -> bool:
        """Return whether it is an object."""
        return not self.is_prefix

    def exists(self) -> bool:
        """Return whether the object exists, or any object with the prefix.

        Raises:
            TorchperfdError: The store cannot be asked.
        """
        if self.is_prefix:
            return bool(self._children()) or bool(self._listed()["common_prefixes"])
        try:
            self.open().close()
        except FileNotFoundError:
            return False
        return True

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yield the objects directly below the prefix, without further prefixes.

        Raises:
            TorchperfdError: The store cannot be asked.
        """
        yield from self._children()

    def _children(self) -> list["ObjectPath"]:
        return [ObjectPath(self.root, each["path"]) for each in self._listed()["objects"]]

    def _listed(self) -> Any:
        store = _store(self.root)
        with _explained(self):
            return import_obstore().list_with_delimiter(store, self.key or None)

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedReader:
        """Open the object for reading by ranges; the reader has at most a few MiB of it in memory.

        Raises:
            FileNotFoundError: There is no such object.
            TorchperfdError: The store cannot be asked, or refuses it.
        """
        return io.BufferedReader(_RangeReader(self), _MAX_RANGE)


AnyPath: TypeAlias = Path | ObjectPath


def find(url: str) -> AnyPath:
    """Return the file, directory, object or prefix of a URL.

    Raises:
        UsageError: It is no such URL.
        NoSuchTargetError: There is nothing.
        TorchperfdError: The store cannot be asked, or obstore is not installed.
    """
    parts = split_url(url)
    key = unquote(parts.path)
    if parts.scheme == "file":
        return Path(key)
    found = ObjectPath(f"{parts.scheme}://{parts.netloc}", key.strip("/"))
    if found.key and not key.endswith("/") and found.exists():
        return found
    found = ObjectPath(found.root, found.key, is_prefix=True)
    if not found.exists():
        raise NoSuchTargetError(f"there is no object at {found}")
    return found


@functools.lru_cache(maxsize=8)
def _store(root: str) -> "ObjectStore":
    """Return the one client of a bucket, whose connections and credentials all reads share."""
    return open_store(root)


# A trace's header fits into the first piece; a long read takes larger ones, and so fewer requests.
_MIN_RANGE: Final = 1 << 17
_MAX_RANGE: Final = 1 << 22


class _RangeReader(io.RawIOBase):
    """Reads an object by requests for ranges, each twice as long as the one before, up to the buffer's size.

    Args:
        path: The object. If it is replaced while it is read, the next read fails.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._obstore = import_obstore()
        self._bucket = _store(path.root)
        self._at = 0
        self._length = _MIN_RANGE
        with _explained(path):
            meta = self._obstore.head(self._bucket, path.key)
        self._size: int = meta["size"]
        # The version that the first request saw.
        self._unchanged = {"if_match": meta["e_tag"]} if meta["e_tag"] else {}

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self._path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._length, self._size - self._at)
        if length <= 0:
            return 0
        options = {"range": (self._at, self._at + length), **self._unchanged}
        with _explained(self._path):
            piece = self._obstore.get(self._bucket, self._path.key, options=options).bytes()
        buffer[: len(piece)] = piece
        self._at += len(piece)
        self._length *= 2
        return len(piece)


@contextlib.contextmanager
def _explained(path: ObjectPath) -> Iterator[None]:
    """Turn obstore's errors into ours, except for the absence of an object."""
    exceptions = import_obstore().exceptions
    try:
        yield
    except FileNotFoundError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
        raise NotAllowedError(
            f"the store refuses {path}: {cause(error)}",
            "check the credentials in the environment of the process that reads it, and their permissions",
        ) from error
    except exceptions.PreconditionError as error:
        raise TorchperfdError(f"{path} was replaced while it was read", "analyse it again") from error
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise TorchperfdError(
            f"cannot read {path}: {cause(error)}", "check bucket, region and endpoint, and the network"
        ) from error
