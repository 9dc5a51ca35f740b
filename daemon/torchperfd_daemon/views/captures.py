"""Captures, as ``torchperfd captures list --json`` has them."""

from typing import Any

import msgspec

from torchperfd_daemon.captures import Catalog, Listed, Listing, Upload
from torchperfd_daemon.captures.upload_marker import read_upload_marker


def listing_dict(catalog: Catalog, listing: Listing) -> dict[str, Any]:
    """Return the document of a listing."""
    uploads = bool(read_upload_marker(catalog.directory))
    return {
        "schema": "torchperfd.captures/1",
        "directory": str(catalog.directory),
        "total": listing.total,
        "captures": [listed_dict(catalog, listed, uploads=uploads) for listed in listing.captures],
    }


def listed_dict(catalog: Catalog, listed: Listed, *, uploads: bool) -> dict[str, Any]:
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
