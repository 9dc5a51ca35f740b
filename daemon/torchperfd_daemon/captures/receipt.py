"""The receipt: a file in a capture's folder with the result of its upload."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

FILE_NAME: Final = ".upload"
SCHEMA: Final = "torchperfd.upload/1"


class Upload(Enum):
    """How far the upload of a capture is."""

    NONE = "none"
    """There is nothing to upload: it is in progress, it failed, or no daemon wrote its manifest."""
    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    """Its files do not match its manifest; the upload is not retried."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of an upload.

    Attributes:
        upload: ``DONE`` or ``REFUSED``.
        manifest_sha256: The hash of the uploaded manifest; the receipt applies to that manifest only.
        url: Where the capture is, with its id.
        at: Unix seconds.
        reason: Why it was refused.
    """

    upload: Upload
    manifest_sha256: str
    url: str
    at: Annotated[float, msgspec.Meta(ge=0)]
    reason: str = ""
    schema: str = SCHEMA

    def encode(self) -> bytes:
        """Return the JSON document."""
        return msgspec.json.encode(self) + b"\n"
