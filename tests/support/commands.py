"""Commands in this process, for tests."""

from collections.abc import Callable

import pytest

from torchperfd_cli import main

Run = Callable[..., tuple[int, str, str]]
"""Runs a command; returns exit code, stdout and stderr."""


def runner(capfd: pytest.CaptureFixture[str], *first: str) -> Run:
    """Return a function that runs a command that begins with these arguments."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main.run_command([*first, *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def with_socket(run: Run, socket: str) -> Run:
    """Return a function that runs a command against the daemon on a socket."""
    return lambda name, *arguments: run(name, "--socket", socket, *arguments)
