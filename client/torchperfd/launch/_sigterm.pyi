"""Types of the C module."""

from typing import NoReturn

ABI: str

def install(seconds: float, /) -> bool:
    """Take SIGTERM over, once per process, if it has its default action and this is not process 1.

    ``signal.getsignal()`` does not show it, and a handler that is installed later replaces it. The first
    SIGTERM wakes :func:`wait`. Another one, from half a second later on, ends the process at once, and so
    does a timer. In forked children SIGTERM has its default effect.

    Args:
        seconds: From the first SIGTERM to the end of the process at the latest.
    """

def release() -> bool:
    """Give SIGTERM its default action back, unless a handler has replaced ours; also in a forked child.

    Returns:
        Whether it has come before, so that the process is about to end.
    """

def wait() -> bool:
    """Wait for SIGTERM or :func:`release`; return whether SIGTERM has come."""

def hold() -> NoReturn:
    """Wait for the end of the process."""

def end() -> NoReturn:
    """End the process by SIGTERM."""
