"""Who may read the HTTP side, and how: the exporters' ``--web.config.file`` of TLS and basic auth.

The file is read again when it, or a file that it names, changes. While it is wrong, what was right
before stays in force, and the log records that once.
"""

import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchperfd_daemon.errors import UsageError

log = logging.getLogger("torchperfd.web")

_TLS: Final = "tls_server_config"
_HTTP: Final = "http_server_config"
_USERS: Final = "basic_auth_users"
_VERSIONS: Final = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENT_AUTH: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# The standards' names, which Go and so the exporters use, and OpenSSL's.
_CIPHERS: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
_CIPHERS_OF_TLS13: Final = (
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
)
# Those that the exporters take too; our own pages need none of the others.
_HEADERS: Final = (
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
    "Content-Security-Policy",
)
_RETRY_S: Final = 5.0
_BCRYPT_STARTS: Final = ("$2a$", "$2b$", "$2y$")
_BCRYPT_LENGTH: Final = 60


class WebConfigError(UsageError):
    """The web configuration cannot be used. One line, whatever names the file has."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(" ".join(problem.split()), " ".join(remedy.split()))


Stamps = dict[Path, object]
"""Files, each with what changes when it does."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The settings of a web configuration file.

    Attributes:
        tls: How to encrypt; None for plain HTTP.
        users: bcrypt hashes by user name; empty if no password is needed.
        headers: Sent with every answer.
        stamps: The files that this was made of, as they were then.
    """

    tls: ssl.SSLContext | None = None
    users: Mapping[str, bytes] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    stamps: Stamps = field(default_factory=dict)


class WebConfigFile:
    """A web configuration that follows its file.

    Raises:
        WebConfigError: It cannot be used; the message names the key and the fix.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._config = load(path)
        self._complaint = ""
        self._next_try = 0.0

    def current(self) -> WebConfig:
        """Return what holds now: the newest version of the file that can be used."""
        changed = any(_stamp(path) != stamp for path, stamp in self._config.stamps.items())
        if changed and self._clock() >= self._next_try:
            try:
                self._config = self._reread()
            except WebConfigError as error:
                self._next_try = self._clock() + _RETRY_S
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.error("%s; the configuration from before stays in force", error)
            else:
                self._complaint = ""
                log.info("read %s again", self._path)
        return self._config

    def _reread(self) -> WebConfig:
        config = load(self._path)
        # A file that is just being written is short of its end, and must not open the page meanwhile.
        if (self._config.tls is None) != (config.tls is None):
            raise WebConfigError(
                f"{self._path}: {_TLS} was added or removed", "restart the daemon to turn TLS on or off"
            )
        if self._config.users and not config.users:
            raise WebConfigError(
                f"{self._path}: {_USERS} is gone", "restart the daemon to serve without passwords"
            )
        return config


def load(path: Path) -> WebConfig:
    """Read a web configuration.

    Raises:
        WebConfigError: It cannot be used; the message names the key and the fix.
    """
    # Stamped before they are read: what changes in between is seen the next time.
    stamps: Stamps = {path: _stamp(path)}
    document = _mapping(_parse(path), str(path))
    _only(document, (_TLS, _HTTP, _USERS), str(path))
    tls = document.get(_TLS)
    return WebConfig(
        tls=None if tls is None else _tls(_mapping(tls, f"{path}: {_TLS}"), path, stamps),
        users=_users(_mapping(document.get(_USERS) or {}, f"{path}: {_USERS}"), path),
        headers=_headers(_mapping(document.get(_HTTP) or {}, f"{path}: {_HTTP}"), path),
        stamps=stamps,
    )


def _parse(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise WebConfigError("a web configuration needs PyYAML", "`pip install pyyaml bcrypt`") from None
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise WebConfigError(
            f"cannot read {path}: {error.strerror}", "name a readable file with --web.config.file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise WebConfigError(f"{path}{where} is no YAML", "correct it") from None


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise WebConfigError(f"{where} is no mapping of names", "write it as `key: value` lines")
    return value


def _only(values: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            raise WebConfigError(f"{where}: {key} is not supported", f"use only {', '.join(known)}")


def _users(users: dict[str, Any], path: Path) -> dict[str, bytes]:
    if users:
        try:
            import bcrypt  # noqa: F401  needed at the first request; checked now
        except ImportError:
            raise WebConfigError(f"{path}: {_USERS} needs bcrypt", "`pip install pyyaml bcrypt`") from None
    hashes = {}
    for name, text in users.items():
        if (
            not isinstance(text, str)
            or not text.isascii()
            or not text.startswith(_BCRYPT_STARTS)
            or len(text) != _BCRYPT_LENGTH
        ):
            raise WebConfigError(
                f"{path}: {_USERS}: the password of {name!r} is no bcrypt hash",
                f"make one with `htpasswd -nBC 10 {name}`",
            )
        hashes[name] = text.encode()
    return hashes


def _headers(http: dict[str, Any], path: Path) -> dict[str, str]:
    # HTTP/2 may be allowed or not: this server speaks HTTP/1.1 either way.
    _only(http, ("http2", "headers"), f"{path}: {_HTTP}")
    headers = _mapping(http.get("headers") or {}, f"{path}: {_HTTP}: headers")
    _only(headers, _HEADERS, f"{path}: {_HTTP}: headers")
    for name, value in headers.items():
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise WebConfigError(f"{path}: {_HTTP}: {name} is no text of one line", "put it in quotes")
    return headers


def _tls(tls: dict[str, Any], path: Path, stamps: Stamps) -> ssl.SSLContext:
    where = f"{path}: {_TLS}"
    _only(
        tls,
        (
            "cert_file",
            "key_file",
            "client_auth_type",
            "client_ca_file",
            "min_version",
            "max_version",
            "cipher_suites",
            "prefer_server_cipher_suites",
        ),
        where,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _choice(tls, "min_version", _VERSIONS, "TLS12", where)
    context.maximum_version = _choice(tls, "max_version", _VERSIONS, "TLS13", where)
    certificate, key = (_named_file(tls, name, path, stamps) for name in ("cert_file", "key_file"))
    try:
        # A key with a passphrase must not make a daemon ask its terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise WebConfigError(
            f"{where}: {certificate} and {key} cannot be used: {_reason(error)}",
            "name a PEM certificate, and its key without a passphrase",
        ) from None
    _ciphers(context, tls.get("cipher_suites") or [], where)
    if tls.get("prefer_server_cipher_suites", True):
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    _client_certificates(context, tls, path, stamps)
    return context


def _client_certificates(context: ssl.SSLContext, tls: dict[str, Any], path: Path, stamps: Stamps) -> None:
    where = f"{path}: {_TLS}"
    mode = _choice(tls, "client_auth_type", _CLIENT_AUTH, "NoClientCert", where)
    if mode is ssl.CERT_NONE:
        if "client_ca_file" in tls:
            raise WebConfigError(
                f"{where}: client_ca_file is set and client_auth_type asks for no certificate",
                "set client_auth_type: RequireAndVerifyClientCert",
            )
        return
    authority = _named_file(tls, "client_ca_file", path, stamps)
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise WebConfigError(
            f"{where}: client_ca_file {authority} cannot be used: {_reason(error)}",
            "name a PEM file of certificates",
        ) from None
    context.verify_mode = mode


def _ciphers(context: ssl.SSLContext, suites: object, where: str) -> None:
    """Allow only these suites; those of TLS 1.3 are all allowed, as with the exporters."""
    chosen = []
    for suite in suites if isinstance(suites, list) else [suites]:
        if suite not in _CIPHERS and suite not in _CIPHERS_OF_TLS13:
            raise WebConfigError(
                f"{where}: cipher_suites: {suite} is not supported", f"use only {', '.join(_CIPHERS)}"
            )
        if suite in _CIPHERS:
            chosen.append(_CIPHERS[suite])
    if chosen:
        context.set_ciphers(":".join(chosen))


def _choice(tls: dict[str, Any], key: str, choices: Mapping[str, Any], default: str, where: str) -> Any:
    value = tls.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise WebConfigError(f"{where}: {key}: {value} is not supported", f"use {' or '.join(choices)}")
    return choices[value]


def _named_file(tls: dict[str, Any], key: str, path: Path, stamps: Stamps) -> Path:
    value = tls.get(key)
    if not isinstance(value, str) or not value:
        raise WebConfigError(f"{path}: {_TLS}: {key} is missing", f"add `{key}: FILE`")
    named = path.parent / value
    stamps[named] = _stamp(named)
    return named


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _stamp(path: Path) -> object:
    try:
        status = os.stat(path)  # noqa: PTH116  asked at every request
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
