"""Files in memory that the daemon finds among this process's descriptors, by name."""

from pathlib import Path


def is_open(file: int, name: str) -> bool:
    """Return whether a descriptor is still that file's: a script that closes all knows not of ours."""
    try:
        target = Path(f"/proc/self/fd/{file}").readlink()
    except OSError:
        return False
    return str(target).startswith(f"/memfd:{name}")
