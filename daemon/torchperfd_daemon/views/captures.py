"""Captures as ``torchperfd captures list --json`` has them; names of runs and captures by unique prefixes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from torchperfd_daemon.captures import Listed, Listing, Upload
from torchperfd_daemon.errors import NoSuchTargetError

_MAX_NAMED: Final = 8


def whole_name(given: str, names: Iterable[str], what: str) -> str:
    """Return the only name with a prefix; the prefix itself where there is none, or where it is empty.

    Raises:
        NoSuchTargetError: Several have the prefix, and none is equal to it.
    """
    known = set(names)
    found = sorted(name for name in known if name.startswith(given))
    if not given or given in known or not found:
        return given
    if len(found) > 1:
        some = ", ".join(found[:_MAX_NAMED])
        raise NoSuchTargetError(f"{len(found)} {what}s begin with {given[:80]}: {some}", "write more of one")
    return found[0]


class Captures(Protocol):
    """Captures in a directory, read by this process or through a daemon."""

    @property
    def directory(self) -> Path:
        """The directory."""

    @property
    def uploads(self) -> bool:
        """Whether a daemon uploads them."""

    def has_analysis(self, capture_id: str, /) -> bool:
        """Return whether the daemon has analysed one."""


def listing_dict(catalog: Captures, listing: Listing) -> dict[str, Any]:
    """Return the document of a listing."""
    uploads = catalog.uploads
    return {
        "schema": "torchperfd.captures/1",
        "directory": str(catalog.directory),
        "total": listing.total,
        "captures": [listed_dict(catalog, listed, uploads=uploads) for listed in listing.captures],
    }


def listed_dict(catalog: Captures, listed: Listed, *, uploads: bool) -> dict[str, Any]:
    """Return a capture: its manifest, and what the directory has of it.

    Args:
        uploads: Whether a daemon uploads captures.
    """
    return {
        **msgspec.to_builtins(listed.record),
        "pinned": listed.pinned,
        "uploaded": uploaded(listed, uploads=uploads),
        "analysed": catalog.has_analysis(listed.record.capture_id),
        "disk_bytes": listed.bytes,
    }


def uploaded(listed: Listed, *, uploads: bool) -> str:
    """Return whether a capture is uploaded, or will be if a daemon uploads captures."""
    if listed.upload is Upload.DONE:
        return "yes"
    return "pending" if uploads and listed.upload is Upload.PENDING else "no"
