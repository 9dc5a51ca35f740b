"""What daemons of a fleet know each other by: a shared secret, certificates, or both."""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet.address import Address

_KEY: Final = "authorization"
_SCHEME: Final = b"Bearer "
_FEWEST_CHARACTERS: Final = 16
_MOST_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate, key and authority in PEM; both sides show a certificate of the one authority."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """The fleet's own; with neither part, only the node itself is trusted."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None

    @property
    def any(self) -> bool:
        """Whether a stranger can be told from a peer."""
        return bool(self.token) or self.tls is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what each call carries."""
        return ((_KEY, _SCHEME.decode() + self.token),) if self.token else ()

    def admits(self, metadata: Any) -> bool:
        """Return whether a call's metadata has the secret, if there is one, in a time that tells nothing."""
        if not self.token:
            return True
        told = next((value for key, value in metadata or () if key == _KEY), "")
        raw = told if isinstance(told, bytes) else told.encode()
        return hmac.compare_digest(raw, _SCHEME + self.token.encode())

    def channel(self) -> grpc.ChannelCredentials | None:
        """Return what a channel to a peer is secured with; None for nothing."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(self.tls.authority, self.tls.key, self.tls.certificate)

    def server(self) -> grpc.ServerCredentials | None:
        """Return what the fleet's port is secured with; None for nothing."""
        if self.tls is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)], self.tls.authority, require_client_auth=True
        )


class Doorkeeper(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Lets calls in that carry the fleet's secret, whatever they call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Go on to the method, or to a refusal."""
        if self._credentials.admits(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the fleet's token is missing or another one; give all daemons the same --fleet-token-file",
    )


def read_credentials(
    token_file: Path | None, certificate: Path | None, key: Path | None, authority: Path | None
) -> Credentials:
    """Read the files that ``--fleet-token-file`` and ``--fleet-tls-*`` name.

    Raises:
        UsageError: One of the three of TLS is missing, or the token is none worth the name.
        TorchperfdError: A file cannot be read.
    """
    tls = None
    if certificate or key or authority:
        if not (certificate and key and authority):
            raise UsageError(
                "TLS between daemons wants three files",
                "give --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca together",
            )
        tls = Tls(_read(certificate), _read(key), _read(authority))
    return Credentials(parse_token(_read(token_file)) if token_file else "", tls)


def parse_token(content: bytes) -> str:
    """Read a secret: one line of visible ASCII characters, 16 of them at least.

    Raises:
        UsageError: It is nothing of the kind.
    """
    text = content[: _MOST_BYTES + 1].strip()
    if not _FEWEST_CHARACTERS <= len(text) <= _MOST_BYTES or not all(0x21 <= byte <= 0x7E for byte in text):
        raise UsageError(
            f"the fleet's token must be {_FEWEST_CHARACTERS} to {_MOST_BYTES:,} characters on one line",
            "make one with `openssl rand -hex 32`",
        )
    return text.decode("ascii")


def check_listening(address: Address, credentials: Credentials) -> None:
    """Refuse to listen where strangers could ask.

    Raises:
        UsageError: Other nodes can reach the address, and nothing tells who they are.
    """
    if not credentials.any and not address.is_loopback:
        raise UsageError(
            f"the fleet's port {address} can be reached by other nodes, and whoever reaches it can ask for"
            " captures and stacks",
            "give --fleet-token-file or --fleet-tls-cert, --fleet-tls-key and --fleet-tls-ca,"
            " or listen on 127.0.0.1",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TorchperfdError(
            f"cannot read {path}: {error.strerror}", "look at the --fleet options of `torchperfd serve`"
        ) from error
