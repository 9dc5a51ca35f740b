"""What client and daemon agree on beside the messages: versions, phases, places, ids of captures.

Imports nothing but the standard library's lightest parts, so that a training process can read it before it
has decided to attach.
"""

import os
import re
import time
from typing import Final

API_MIN: Final = 1
"""Oldest protocol version this code still speaks."""

API_MAX: Final = 1
"""Newest protocol version this code speaks."""

BUNDLE: Final = "bundle"
"""The feature of a daemon that takes several messages in one."""

STACKS: Final = "stacks"
"""The feature of a client that reports its threads' stacks."""

CAPTURE_ORDER: Final = "capture_order"
"""The feature of a daemon that captures the whole job when rank 0's script asks for it."""

CAPTURE_KINDS: Final = "capture_kinds"
"""The feature of a client that can make other captures than traces."""

COLLECTIVES: Final = "collectives"
"""The feature of a client that reports the progress of its process groups."""

FREQUENT_REPORTS: Final = "frequent_reports"
"""The feature of a client that reports twice per second while a live page shows its run."""

PAGE: Final = "page"
"""The feature of a daemon that serves the live page beside its metrics."""

NATIVE_HOOKS: Final = "native_hooks"
"""The feature of a client whose hooks are compiled."""

REFERENCE_HOOKS: Final = "reference_hooks"
"""The feature of a client whose hooks run in Python: no compiler was there when the package was built."""

HANDOVER: Final = "handover"
"""The feature of a client that can hand the files of captures over to the daemon."""

FEATURES: Final = (
    *("steps", "account", "capture", BUNDLE, STACKS, CAPTURE_ORDER, CAPTURE_KINDS, COLLECTIVES),
    *(FREQUENT_REPORTS, PAGE, HANDOVER),
)
"""Optional abilities announced in Hello and Welcome; unknown ones are ignored."""

PHASES: Final = (
    "data",
    "h2d",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "zero_grad",
    "collective_wait",
    "validate",
    "checkpoint",
    "other",
)
"""The closed set of built-in phases; exclusive host time, they sum to the step."""

MAX_USER_PHASES: Final = 16

MIN_KERNELS_PER_LAUNCH: Final = 0.9
"""Below this a trace lacks kernels; the last ones of a capture always may be missing."""

AUTOMATIC_CAPTURE_S: Final = 120.0
"""A capture that a run makes by itself is given up after this time: its user's captures wait for it."""

LONG_PAUSE_S: Final = 1.0
"""A capture whose end pauses training for longer is worth a warning."""

STACKS_FILE: Final = "torchperfd-stacks"
"""Name of the file in memory that a training process's stacks are written into upon a signal.

Its first line is a JSON object: ``signal`` to send to ``thread`` (the kernel's id of one that runs Python
a few times per second), ``training`` (the training thread's ident) and ``package`` (directory of the
client's own code). To be sent only while that thread waits for the interpreter.
"""

HANDOVER_GREETING: Final = b"torchperfd captures 1\n"
"""What a connection that hands files of a capture over begins with, instead of HTTP/2."""

HANDOVER_READY: Final = b"ready\n"
"""The daemon's answer to the greeting."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path a Linux unix socket address can hold (108 bytes with the NUL)."""

SYSTEM_SOCKET: Final = "/run/torchperfd/daemon.sock"

SYSTEM_CAPTURES: Final = "/var/lib/torchperfd/captures"
"""The captures directory of a node's service, unless configured otherwise."""


def overlapping_api(low: int, high: int) -> int | None:
    """Return the newest version both this side and [low, high] speak, or None."""
    newest = min(API_MAX, high)
    return newest if newest >= max(API_MIN, low) else None


def user_runtime_dir() -> str:
    """Return the directory for this user's socket; the caller creates it with mode 0700."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return f"{base}/torchperfd"
    return f"/tmp/torchperfd-{os.getuid()}"


def user_socket() -> str:
    return f"{user_runtime_dir()}/daemon.sock"


def socket_candidates() -> tuple[str, ...]:
    """Return the places where a daemon may listen, in the order to try them.

    ``TORCHPERFD_SOCKET`` names the only one when set; else the node's service
    comes before this user's own daemon.
    """
    chosen = os.environ.get("TORCHPERFD_SOCKET")
    if chosen:
        return (chosen,)
    return (SYSTEM_SOCKET, user_socket())


def user_captures_dir() -> str:
    """Return this user's captures directory, unless a daemon names another one."""
    chosen = os.environ.get("TORCHPERFD_CAPTURES_DIR")
    if chosen:
        return chosen
    return f"{_user_state_dir()}/captures"


def user_runs_dir() -> str:
    """Return the directory where this user's reports of runs are kept."""
    return os.environ.get("TORCHPERFD_RUNS_DIR") or f"{_user_state_dir()}/runs"


def _user_state_dir() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return f"{state}/torchperfd"


CAPTURE_ID: Final = re.compile(r"([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")
"""What an id looks like; the group is the time."""


def new_capture_id(now: float) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{os.urandom(3).hex()}"
