"""The processes of this machine that belong to a test."""

from pathlib import Path

import psutil


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
