"""Folders with a Debian in them, and one that is booted: systemd is its process 1, and it has no network."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.node import eventually

STAND_IN: Final = ("python3", "python3-pip", "python3-venv", "python3-dev", "ca-certificates")
"""What the image's base has, as Debian's packages."""

_CGROUPS: Final = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
"""Where the hierarchy of version 2 is: beside those of version 1, or alone."""

# What a service could change of this machine is read-only, as in any container.
_BOOT: Final = """
set -e
echo $$ >"$1/cgroup.procs"
exec unshare --cgroup sh -ec '
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 tmpfs /mnt
  cp -a "$1/." /mnt
  cd /mnt
  mount -t proc proc proc
  mount --bind proc/sys proc/sys
  mount -o remount,bind,ro proc/sys
  mount -t sysfs -o ro sysfs sys
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mount -t tmpfs -o mode=755 tmpfs dev
  mount -t tmpfs -o mode=755 tmpfs run
  for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
  done
  mkdir dev/pts dev/shm
  ln -s /proc/self/fd dev/fd
  mkdir -p run/host
  pivot_root . run/host
  umount -l /run/host
  exec env -i container=other PATH=/usr/bin:/usr/sbin /usr/lib/systemd/systemd --unit=multi-user.target
' sh "$2"
"""


def bootstrap(suite: str, packages: tuple[str, ...], target: Path) -> None:
    """Install a release of Debian, with its essential packages and those named, into a new folder.

    Raises:
        AssertionError: It failed; the message has the last lines of what debootstrap printed.
    """
    include = [f"--include={','.join(packages)}"] if packages else []
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", *include, suite, str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-5:])


class BootedFolder:
    """A folder whose systemd runs.

    Args:
        process: Its process 1, as this machine numbers it.
    """

    def __init__(self, process: int) -> None:
        self.folder = Path(f"/proc/{process}/root")
        """Where this machine sees its files."""
        self._process = process

    def run(self, *command: str, user: str = "root", check: bool = True) -> str:
        """Run a command in it to its end; return what it printed.

        Raises:
            AssertionError: The command failed, and ``check`` is set.
        """
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        inside = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command)
        done = subprocess.run(
            ["nsenter", "--target", str(self._process), *namespaces, *inside],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
        return done.stdout.strip()


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[BootedFolder]:
    """Boot a copy of a folder, in memory, and end all its processes after the block."""
    hierarchy = next(path for path in _CGROUPS if (path / "cgroup.procs").exists())
    group = hierarchy / f"torchperfd-test-{os.getpid()}"
    group.mkdir()
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as output:
        starter = subprocess.Popen(
            [*unshare, "sh", "-c", _BOOT, "sh", str(group), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        eventually(lambda: starter.poll() is None and children.read_text().split(), 20, log.read_text)
        machine = BootedFolder(int(children.read_text().split()[0]))
        # Degraded, where a unit wants what this machine does not let it do.
        states = ("running", "degraded")
        is_up = lambda: machine.run("systemctl", "is-system-running", check=False) in states  # noqa: E731
        eventually(is_up, 60, log.read_text)
        yield machine
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        _remove_groups(group)


def _remove_groups(group: Path) -> None:
    """Remove a control group and those in it, once their processes have ended."""

    def is_gone() -> bool:
        for directory, _, _ in os.walk(group, topdown=False):
            # Busy for a moment longer than it has processes.
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
        return not group.exists()

    eventually(is_gone, 20)
