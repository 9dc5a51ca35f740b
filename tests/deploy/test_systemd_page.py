"""The service as deploy/systemd/README.md sets it up by hand, on a booted Debian 12."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.debian_folder import BootedFolder, booted
from tests.support.node import ROOT
from tests.support.page_commands import blocks, run_commands
from tests.support.wheels import build_wheel

pytestmark = [
    pytest.mark.needs("debootstrap", "gcc"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can boot a folder"),
    pytest.mark.timeout(600),
]

FILES = "/srv/torchperfd"
CONFIGURATION = "/etc/torchperfd/config.toml"


def download(target: Path) -> None:
    """Download what the page installs for the Python of Debian 12: the machine has no network."""
    for wanted in (("--require-hashes", "-r", str(ROOT / "locks" / "runtime.txt")), ("py-spy",)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--python-version", "3.11"]
        subprocess.run([*command, "--only-binary=:all:", "-d", str(target), *wanted], check=True)


@pytest.fixture
def machine(debian12: Path, tmp_path: Path) -> Iterator[BootedFolder]:
    # pip would follow the link to the machine's root, and write into this one's.
    wheel = build_wheel(ROOT, tmp_path)
    download(tmp_path / "wheels")
    with booted(debian12) as machine:
        files = Path(f"{machine.folder}{FILES}")
        shutil.copytree(ROOT / "deploy" / "systemd", files)
        shutil.copy(wheel, files)
        shutil.copytree(tmp_path / "wheels", machine.folder / "srv" / "wheels")
        pip = machine.folder / "etc" / "pip.conf"
        pip.write_text("[global]\nno-index = true\nfind-links = /srv/wheels\n")
        yield machine


def configure(machine: BootedFolder, text: str) -> None:
    """Write the page's settings, and give the machine the address that they name."""
    (block,) = (block for _, block in blocks(text, "toml"))
    path = Path(f"{machine.folder}{CONFIGURATION}")
    path.parent.mkdir(exist_ok=True)
    path.write_text(block)
    machine.run("ip", "address", "add", "10.0.0.7/32", "dev", "lo")


def modes(machine: BootedFolder, *paths: str) -> list[str]:
    return machine.run("stat", "-c", "%a %U", *paths).splitlines()


def main_pid(machine: BootedFolder) -> str:
    return machine.run("systemctl", "show", "--property", "MainPID", "--value", "torchperfd")


def capabilities(machine: BootedFolder) -> int:
    status = machine.run("cat", f"/proc/{main_pid(machine)}/status").splitlines()
    (found,) = (line.split()[1] for line in status if line.startswith("CapEff:"))
    return int(found, 16)


def traces(machine: BootedFolder) -> str:
    """Return the files and accounts of the service, without what was put beside its installation."""
    places = f"find / -xdev -not -path '{FILES}*' -name '*torchperfd*'; find /run -name '*torchperfd*'"
    return machine.run("bash", "-c", f"{places}; getent passwd torchperfd; getent group torchperfd; true")


def test_commands_of_the_page_install_and_remove_a_service(machine: BootedFolder) -> None:
    before = traces(machine)
    text = (ROOT / "deploy/systemd/README.md").read_text(encoding="utf-8")
    installing, removing = text.split("\n## Remove\n")
    for line in run_commands(installing):
        if line.endswith("config check"):
            configure(machine, text)
        machine.run("bash", "-c", f"cd {FILES} && {line}")
    # As docs/operating.md has them.
    sockets = [f"/run/torchperfd/{name}" for name in ("daemon.sock", ".daemon.sock.rpc", "page.token")]
    assert modes(machine, "/run/torchperfd", *sockets, "/var/lib/torchperfd/captures") == [
        "755 torchperfd",
        "666 torchperfd",
        "600 torchperfd",
        "600 torchperfd",
        "700 torchperfd",
    ]
    listening = [line.split()[3] for line in machine.run("ss", "-Hltn").splitlines()]
    assert listening == ["10.0.0.7:9407"]
    assert machine.run("torchperfd", "ps", "--json", user="daemon").startswith("{")
    assert "denied" in machine.run("ls", "/var/lib/torchperfd/captures", user="daemon", check=False)
    # CAP_SYS_PTRACE alone, which the page's drop-in gives.
    assert capabilities(machine) == 1 << 19

    machine.run("rm", "-r", "/etc/systemd/system/torchperfd.service.d")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "torchperfd")
    assert capabilities(machine) == 0
    machine.run("systemd-analyze", "security", "--threshold=23", "--no-pager", "torchperfd")

    for line in run_commands(removing):
        machine.run("bash", "-c", line)
    assert traces(machine) == before
