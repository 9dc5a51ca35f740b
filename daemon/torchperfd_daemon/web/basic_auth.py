"""Basic authentication against bcrypt hashes, without letting guesses hold the daemon up."""

import asyncio
import base64
import binascii
import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

_REMEMBERED: Final = 64
_PASSWORD_BYTES: Final = 72
"""bcrypt uses no more bytes of a password than this."""


class BasicAuth:
    """Checks ``Authorization`` headers.

    A check takes bcrypt a tenth of a second of CPU on purpose. So it happens on a thread, one at a
    time, and what came of it is remembered: a scraper that comes back pays nothing.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        # The cache must not reveal passwords to a reader of this process's memory.
        self._key = os.urandom(32)

    async def admits(self, header: str, users: Mapping[str, bytes]) -> bool:
        """Tell whether a header names one of these users with the right password.

        Args:
            header: The value of ``Authorization``; empty when there is none.
            users: bcrypt hashes by name; at least one.
        """
        credentials = parse_credentials(header)
        if credentials is None:
            return False
        name, password = credentials
        # The same work for an unknown name, so that timing does not reveal which names exist.
        known_hash = users.get(name, next(iter(users.values())))
        digest = hashlib.blake2b(name.encode() + b"\0" + known_hash + password, key=self._key).digest()
        if digest not in self._known:
            async with self._one_at_a_time:
                if digest not in self._known:
                    right = await asyncio.to_thread(_matches, password, known_hash)
                    self._remember(digest, right and name in users)
        self._known.move_to_end(digest)
        return self._known[digest]

    def _remember(self, digest: bytes, admitted: bool) -> None:
        self._known[digest] = admitted
        while len(self._known) > _REMEMBERED:
            # Guesses are forgotten first: they must not push out the scraper that is right.
            wrong = (old for old, right in self._known.items() if not right and old != digest)
            del self._known[next(wrong, next(iter(self._known)))]


def parse_credentials(header: str) -> tuple[str, bytes] | None:
    """Return name and password of a basic ``Authorization`` header, None when it is no such."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _matches(password: bytes, known_hash: bytes) -> bool:
    import bcrypt

    try:
        return bool(bcrypt.checkpw(password[:_PASSWORD_BYTES], known_hash))
    except ValueError:
        # No password that bcrypt takes, or no hash that it knows.
        return False
