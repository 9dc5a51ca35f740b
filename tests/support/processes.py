"""The processes of this machine that belong to a test."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.node import Node, eventually


def processes_of(script: Path) -> list[int]:
    """Return the processes that have a script on their command line: also its loaders' workers."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(script) in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def started(node: Node, script: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start a command in a session of its own; return once a process of its own runs the script."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchperfd", *arguments],
        env=node.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # The command has the script on its command line as well.
    eventually(lambda: len(processes_of(script)) >= 2, 60)
    return process
