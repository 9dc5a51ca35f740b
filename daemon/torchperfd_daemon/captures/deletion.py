"""Deletes a directory tree of any depth with few open descriptors, no recursion and a bound on its work.

A tree may be thousands of directories deep. So directories are moved to its top before they are read, and no
path has more than two names.
"""

import contextlib
import itertools
import os
import secrets
from typing import Final

MAX_ENTRIES: Final = 100_000
"""Entries that one call deletes or moves at most. The next call continues with the rest."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def delete_tree(name: str, parent: int, most: int = MAX_ENTRIES) -> bool:
    """Delete a directory and all in it; return whether all of it is gone.

    Args:
        name: The directory, below ``parent``. A link is not followed.
        parent: Descriptor of the directory that holds it.
        most: Entries to delete or move before giving up for this time.

    Raises:
        OSError: Something in it cannot be deleted. The rest may be gone already.
    """
    top = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        left = most
        while left > 0:
            entries = _entries(top, left)
            if not entries:
                break
            for entry, is_directory in entries:
                left -= _delete_directory(top, entry, left) if is_directory else _delete_file(top, entry)
                if left <= 0:
                    return False
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)
    return True


def owner_of(name: str, parent: int) -> int | None:
    """Return the user that a directory below ``parent`` belongs to; None where there is no such directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
    return None


def _entries(directory: int, most: int) -> list[tuple[str, bool]]:
    """Return some entries of a directory, and whether each is a directory."""
    with os.scandir(directory) as found:
        # Read before the directory is changed, which may make the kernel skip entries.
        some = itertools.islice(found, most)
        return [(each.name, each.is_dir(follow_symlinks=False)) for each in some]


def _delete_file(directory: int, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return 1


def _delete_directory(top: int, name: str, most: int) -> int:
    """Delete a directory in ``top`` with its files; move directories in it to ``top``.

    Returns:
        How many entries that took, at least 1.
    """
    handled = 1
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=top)
    except (FileNotFoundError, NotADirectoryError):
        return handled
    try:
        for entry, is_directory in _entries(directory, most):
            handled += 1
            if is_directory:
                os.rename(entry, secrets.token_hex(16), src_dir_fd=directory, dst_dir_fd=top)
            else:
                _delete_file(directory, entry)
    finally:
        os.close(directory)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(name, dir_fd=top)
        except OSError:
            # Not empty: it has more entries than one call may handle, or a process adds to it.
            if handled == 1:
                raise
    return handled
