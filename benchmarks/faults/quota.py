"""A control group of one process, whose processor time can be limited; of version 1 or 2."""

import os
from pathlib import Path
from typing import Final

_PERIOD_US: Final = 100_000
_ROOT: Final = Path("/sys/fs/cgroup")


class Quota:
    """A group without a limit at first. Only root, or the user that a group is delegated to, may create one.

    Args:
        name: Of the group, unique on the node.
        root: Where the control groups are mounted.
    """

    def __init__(self, name: str, root: Path = _ROOT) -> None:
        self._unified = (root / "cgroup.controllers").exists()
        self.path = root / name if self._unified else root / "cpu" / name

    def enter(self) -> None:
        """Make the group, and move this process into it.

        Raises:
            OSError: It may not, or there are no control groups.
        """
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, processors: float) -> None:
        """Allow so many seconds of processor time per second."""
        quota = round(processors * _PERIOD_US)
        (self.path / self._file).write_text(f"{quota} {_PERIOD_US}" if self._unified else str(quota))

    def lift(self) -> None:
        """Allow any time again."""
        (self.path / self._file).write_text(f"max {_PERIOD_US}" if self._unified else "-1")

    def remove(self) -> None:
        """Remove the group, once no process is in it."""
        self.path.rmdir()

    @property
    def _file(self) -> str:
        return "cpu.max" if self._unified else "cpu.cfs_quota_us"


def why_not(root: Path = _ROOT) -> str:
    """Return why no group can be made and limited here; empty when it can."""
    quota = Quota(f"torchperfd-faults-{os.getpid()}-try", root)
    try:
        quota.path.mkdir()
        try:
            quota.limit(1.0)
        finally:
            quota.remove()
    except OSError as error:
        return f"no control group can be made: {error.strerror or error}"
    return ""
