"""Ids of captures: the time of the request (UTC), and a random suffix."""

import re
import secrets
import time
from typing import Final

CAPTURE_ID: Final = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")
"""What an id looks like; the group is the time."""


def new_capture_id(now: float) -> str:
    """Return the id of a capture that is requested at a Unix time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"
