"""The doctor's look at the daemon that runs: what keeps it from seeing, keeping or sharing what it should."""

import http.client
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from torchperfd._version import __revision__, __version__
from torchperfd.v1 import access, contract, control_pb2
from torchperfd_daemon.doctor.checks import Finding

_PAGE_TIMEOUT_S: Final = 5.0
_MAX_PAGE_BYTES: Final = 64 * 2**20
_MIN_LOST: Final = 0.001
"""A smaller share of lost steps is what a restart of the daemon costs."""
_LOG: Final = "its log has the reason: `journalctl -u torchperfd`, or the terminal of `torchperfd serve`"

Samples = Sequence[tuple[str, Mapping[str, str], float]]
"""The samples of a metrics page: name, labels and value."""


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder: who owns it, and who may use it.

    Attributes:
        mode: Its permission bits.
        is_read_only: Whether its file system allows no change.
    """

    uid: int
    mode: int
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """A daemon that answers, as a command sees it; None stands for what could not be looked at.

    Attributes:
        build: Its version and commit; ``own_build`` has those of this command.
        uid: The user that it runs as.
        captures: Its captures directory, at ``captures_dir``.
        token: The file of its page's token, at ``token_path``.
        samples: Of its metrics page.
        skipped: Why a check has nothing to look at, by its name.
    """

    build: tuple[str, str]
    own_build: tuple[str, str]
    uid: int
    socket_path: str
    socket: Place
    captures_dir: str
    captures: Place | None = None
    token_path: str = ""
    token: Place | None = None
    samples: Samples | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


def read_daemon(path: str, info: control_pb2.GetInfoResponse, token: str) -> DaemonFacts:
    """Look at a daemon's socket, files and metrics page.

    Args:
        path: Its socket.
        info: Its answer to ``GetInfo``.
        token: Where the token of its page lies.

    Raises:
        OSError: It no longer listens.
    """
    skipped: dict[str, str] = {}
    places: dict[str, Place | None] = {}
    for check, name in (("daemon-captures", info.captures_dir), ("daemon-token", token)):
        try:
            places[check] = _place(name)
        except OSError as error:
            places[check] = None
            skipped[check] = f"{name}: {error.strerror}"
    samples = None
    try:
        samples = read_page(info.metrics_url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        skipped["daemon-metrics"] = f"{info.metrics_url}: {error}"
    return DaemonFacts(
        (info.version, info.revision),
        (__version__, __revision__),
        access.find_listener(path).uid,
        path,
        _place(path),
        info.captures_dir,
        places["daemon-captures"],
        token,
        places["daemon-token"],
        samples,
        skipped,
    )


def _place(path: str) -> Place:
    status = Path(path).lstat()
    flags = os.statvfs(path).f_flag
    return Place(status.st_uid, stat.S_IMODE(status.st_mode), bool(flags & os.ST_RDONLY))


def read_page(url: str) -> Samples:
    """Return the samples of a metrics page.

    Raises:
        OSError: It cannot be read.
        http.client.HTTPException: Its server does not speak HTTP.
        ValueError: It is none, or needs a password.
    """
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=_PAGE_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"answers {answer.status} {answer.reason}")
        text = answer.read(_MAX_PAGE_BYTES).decode(errors="replace")
    finally:
        connection.close()
    families = text_string_to_metric_families(text)
    return [(each.name, each.labels, each.value) for family in families for each in family.samples]


def examine_daemon(facts: DaemonFacts) -> list[Finding]:
    """Return all that is wrong with a daemon, in the order of the checks."""
    return [finding for check in _CHECKS for finding in check(facts)]


def _check_build(facts: DaemonFacts) -> Iterator[Finding]:
    if facts.build != facts.own_build:
        (running, own) = (
            f"{version} ({revision[:12] or 'commit unknown'})"
            for version, revision in (facts.build, facts.own_build)
        )
        yield Finding(
            "daemon-version",
            "daemon",
            f"torchperfd {running} runs, this command is {own}",
            "the older one lacks what the newer one reports",
            "install the same version for both, then restart it: `sudo systemctl restart torchperfd`",
        )


def _check_socket(facts: DaemonFacts) -> Iterator[Finding]:
    path = facts.socket_path
    if facts.socket.uid not in (0, facts.uid):
        yield Finding(
            "daemon-socket",
            path,
            f"it belongs to user {facts.socket.uid}, the daemon to user {facts.uid}",
            "its owner can put another socket in its place",
            f"stop the daemon, remove {path}, and start it again",
        )
    if path == contract.SYSTEM_SOCKET and not facts.socket.mode & stat.S_IWOTH:
        yield Finding(
            "daemon-socket",
            path,
            f"its mode is {facts.socket.mode:03o}",
            "training processes of other users find no daemon",
            "start it with `--socket-mode 666`, as torchperfd.service does",
        )


def _check_captures(facts: DaemonFacts) -> Iterator[Finding]:
    place, folder = facts.captures, facts.captures_dir
    if place is None:
        return
    is_owner = place.uid == facts.uid and place.mode & stat.S_IWUSR and place.mode & stat.S_IXUSR
    if place.is_read_only or not (is_owner or facts.uid == 0):
        state = f"the daemon's user {facts.uid} cannot write to it (owner {place.uid}, mode {place.mode:03o})"
        if place.is_read_only:
            state = "its file system is read-only"
        yield Finding(
            "daemon-captures",
            folder,
            state,
            "captures, their analyses and the totals of goodput are not kept",
            f"`chown {facts.uid} {folder} && chmod 700 {folder}`, or choose another with --captures-dir",
        )


def _check_token(facts: DaemonFacts) -> Iterator[Finding]:
    token = facts.token
    if token is not None and (token.uid not in (0, facts.uid) or token.mode & 0o077):
        yield Finding(
            "daemon-token",
            facts.token_path,
            f"other users can read or replace it (owner {token.uid}, mode {token.mode:03o})",
            "who has it may do everything that the daemon's user may",
            "restart the daemon, which writes a new one of mode 600",
        )


def _check_collectors(facts: DaemonFacts) -> Iterator[Finding]:
    for labels, success in _values(facts, "torchperfd_collector_success"):
        if not success:
            yield Finding(
                "daemon-collectors",
                f"collector {labels['collector']}",
                "its newest sample failed",
                "its metrics are missing, and verdicts do not take them into account",
                _LOG,
            )


def _check_losses(facts: DaemonFacts) -> Iterator[Finding]:
    received = sum(value for _, value in _values(facts, "torchperfd_ingest_events_total"))
    for labels, lost in _values(facts, "torchperfd_ingest_dropped_events_total"):
        if lost > _MIN_LOST * (received + lost):
            yield Finding(
                "daemon-losses",
                "daemon",
                f"{lost:,.0f} of {received + lost:,.0f} steps were lost since it started ({labels['where']})",
                "totals and verdicts miss them",
                "give the daemon more CPU time (`CPUWeight=` of its unit), and see the report of the run",
            )
    for _, left_out in _values(facts, "torchperfd_label_overflow_total"):
        if left_out:
            yield Finding(
                "daemon-losses",
                "metrics page",
                f"{left_out:,.0f} series were left out since it started",
                "the newest ranks are on no dashboard",
                "a daemon per job, or fewer ranks on this node",
            )


def _values(facts: DaemonFacts, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
    return ((labels, value) for each, labels, value in facts.samples or () if each == name)


_CHECKS: Final[tuple[Callable[[DaemonFacts], Iterator[Finding]], ...]] = (
    _check_build,
    _check_socket,
    _check_captures,
    _check_token,
    _check_collectors,
    _check_losses,
)
