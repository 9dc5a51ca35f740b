"""What this process has open."""

import os
from pathlib import Path


def memory_files(name: str) -> list[int]:
    """Return the descriptors of files in memory of that name."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
