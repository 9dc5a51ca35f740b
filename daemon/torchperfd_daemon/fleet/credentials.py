"""The credentials by which the fleet's daemons authenticate each other.

They are a shared secret, certificates, or both.
"""

import hmac
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.secret_files import read_file

log = logging.getLogger("torchperfd.server")

Current = Callable[[], "Credentials"]
"""Returns the credentials in force: their files may have been read again."""

_KEY: Final = "authorization"
_SCHEME: Final = b"Bearer "
_MIN_CHARACTERS: Final = 16
_MAX_BYTES: Final = 4096
_REMEDY: Final = "check the --fleet options of `torchperfd serve`"
_MAX_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate, key and authority in PEM; both sides show a certificate of the one authority."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """The fleet's own; with neither part, only the node itself is trusted.

    Attributes:
        token: The secret that this daemon's own calls carry; empty for none.
        tls: Its certificates; None for plain connections.
        also_accepted: Further secrets that calls of peers may carry, while the fleet changes its secret.
    """

    token: str = field(default="", repr=False)
    tls: Tls | None = None
    also_accepted: tuple[str, ...] = field(default=(), repr=False)

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether there is a secret, and whether there are certificates."""
        return bool(self.token), self.tls is not None

    @property
    def any(self) -> bool:
        """Whether there are credentials at all, so that peers are authenticated."""
        return any(self.kinds)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_KEY, _SCHEME.decode() + self.token),) if self.token else ()

    def admits(self, metadata: Any) -> bool:
        """Return whether a call's metadata has the secret, if there is one; compared in constant time."""
        if not self.token:
            return True
        given = next((value for key, value in metadata or () if key == _KEY), "")
        raw = given if isinstance(given, bytes) else given.encode()
        accepted = [
            hmac.compare_digest(raw, _SCHEME + token.encode()) for token in (self.token, *self.also_accepted)
        ]
        return any(accepted)

    def channel(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel to a peer; None for a plain one."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(self.tls.authority, self.tls.key, self.tls.certificate)


def server_credentials(current: Current) -> grpc.ServerCredentials | None:
    """Return the credentials of the fleet's port; None for a plain one.

    Each new connection gets the certificates in force at that moment.
    """
    if (tls := current().tls) is None:
        return None
    served = tls

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        newest = current().tls
        if newest is None or newest == served:
            return None
        served = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        changed,  # type: ignore[arg-type] # its stub lacks None, which means no change
        require_client_authentication=True,
    )


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.authority)


def read_credentials(
    token_file: Path | None, certificate: Path | None, key: Path | None, authority: Path | None
) -> Credentials:
    """Read the files that ``--fleet-token-file`` and ``--fleet-tls-*`` name.

    Raises:
        UsageError: One of the three TLS files is missing or unusable, or the token is too weak.
        TorchperfdError: A file cannot be read, is too large, or is a secret that others can read.
    """
    tls = None
    if certificate or key or authority:
        if not (certificate and key and authority):
            raise UsageError(
                "TLS between daemons needs three files",
                "give --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca together",
            )
        tls = Tls(
            read_file(certificate, _REMEDY),
            read_file(key, _REMEDY, secret=True),
            read_file(authority, _REMEDY),
        )
        _check_pem(tls, certificate, key, authority)
    tokens = parse_tokens(read_file(token_file, _REMEDY, secret=True)) if token_file else ("",)
    return Credentials(tokens[0], tls, tokens[1:])


def _check_pem(tls: Tls, certificate: Path, key: Path, authority: Path) -> None:
    """Refuse files that gRPC could not use: it would name the address of the port as the reason.

    Raises:
        UsageError: A file is not PEM, or the key is not that of the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase must not make a daemon ask its terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{certificate} and {key} are not a certificate and its key",
            "name a PEM certificate, and its key without a passphrase",
        ) from error
    try:
        context.load_verify_locations(cadata=tls.authority.decode("ascii"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{authority} contains no certificate", f"name a PEM file; {_REMEDY}") from error


def parse_tokens(content: bytes) -> tuple[str, ...]:
    """Read secrets, one a line: visible ASCII characters, 16 of them at least.

    The first is what this daemon sends; all of them are accepted.

    Raises:
        UsageError: There is none, one of them is no secret, or there are more than 8.
    """
    lines = [line.strip() for line in content[: _MAX_BYTES * _MAX_TOKENS + 1].strip().splitlines()]
    tokens = [line for line in lines if line] or [b""]
    for token in tokens:
        if not _MIN_CHARACTERS <= len(token) <= _MAX_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
            raise UsageError(
                f"the fleet's token must be {_MIN_CHARACTERS} to {_MAX_BYTES:,} characters on one line",
                "create one with `openssl rand -hex 32`",
            )
    if len(tokens) > _MAX_TOKENS:
        raise UsageError(
            f"the file of the fleet's token has more than {_MAX_TOKENS} lines",
            "remove those no longer in use",
        )
    return tuple(token.decode("ascii") for token in tokens)


def check_listening(address: Address, credentials: Credentials) -> None:
    """Refuse to listen on a public address without credentials.

    Raises:
        UsageError: Other nodes can reach the address, and there are no credentials.
    """
    if not credentials.any and not address.is_loopback:
        raise UsageError(
            f"other nodes can reach the fleet's port {address}, and without credentials all of them can"
            " request captures and stacks",
            "give --fleet-token-file or --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca,"
            " or listen on 127.0.0.1",
        )


class CredentialFiles:
    """The credentials in force, and the files that they were read from.

    Raises:
        TorchperfdError: A file cannot be used; the message states what to do.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._current = self._read()

    def current(self) -> Credentials:
        return self._current

    def reload(self) -> None:
        """Read the files again; if one is invalid, the previous credentials stay in force."""
        try:
            newest = self._read()
            if newest.kinds != self._current.kinds:
                raise UsageError(
                    "the fleet's token or TLS was added or removed", "restart the daemon to apply that"
                )
        except TorchperfdError as error:
            log.error("%s; the fleet's previous credentials stay in force", error)
        else:
            self._current = newest

    def _read(self) -> Credentials:
        settings = self._settings
        return read_credentials(
            settings.fleet_token_file, settings.fleet_tls_cert, settings.fleet_tls_key, settings.fleet_tls_ca
        )
