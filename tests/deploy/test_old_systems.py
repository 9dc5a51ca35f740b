"""The wheel of `make release-check` on a Debian with an older glibc, without a compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.deploy.debian_folder import bootstrap
from tests.support.node import ROOT
from tools.release.build import ToolError, run
from tools.release.deb import download_options, requirements_for

pytestmark = [
    pytest.mark.needs("debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to a folder"),
    pytest.mark.timeout(600),
]

SUITE: Final = "bullseye"
GLIBC: Final = (2, 31)

INTERPRETER: Final = (
    "backend-ai-krunner-static-gnu==4.4.0"
    " --hash=sha256:c343d8b16b0dde2992c1c6687c1cac9b7c7a49ec1b77c5d75b1dc316ad040811"
)
"""Carries a relocatable CPython that needs no more than glibc 2.17; Debian 11 has only Python 3.9."""

PYTHON: Final = "3.13"

# All that is compiled, and a daemon with simulated ranks, whose answers need most of the dependencies.
PROGRAM: Final = """
import os, subprocess, sys, time, urllib.request
import torchperfd.launch._sigterm
from torchperfd.events import NATIVE
from torchperfd.steps.templates import AVAILABLE

assert NATIVE and AVAILABLE
command = [sys.executable, "-m", "torchperfd"]
daemon = subprocess.Popen([*command, "serve", "--demo", "--socket", "/tmp/daemon.sock"])
deadline = time.monotonic() + 60
while True:
    words = [*command, "ranks", "--socket", "/tmp/daemon.sock"]
    ranks = subprocess.run(words, capture_output=True, text=True)
    if ranks.returncode == 0 or time.monotonic() > deadline:
        break
    time.sleep(0.5)
print(os.confstr("CS_GNU_LIBC_VERSION"), ranks.stdout, ranks.stderr)
print(urllib.request.urlopen("http://127.0.0.1:9407/metrics").read().decode())
daemon.terminate()
assert daemon.wait(20) == 0
"""


@pytest.fixture
def wheel() -> Path:
    """The wheel in dist/, if it is of this commit."""
    commit = run("git", "-C", str(ROOT), "rev-parse", "HEAD")[:12]
    for path in (ROOT / "dist").glob("*_x86_64.whl"):
        with zipfile.ZipFile(path) as archive:
            if f'"{commit}"' in archive.read("torchperfd/_build.py").decode():
                return path
    reason = f"dist/ has no wheel of {commit}: run `make release-check`"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with the old Debian and a newer Python than it has."""
    directory = Path(tempfile.mkdtemp(prefix="torchperfd-old-"))
    try:
        try:
            bootstrap(SUITE, (), directory / SUITE)
            add_interpreter(directory / SUITE, directory)
        except (AssertionError, ToolError) as error:
            pytest.skip(f"not to be had here: {error}")
        yield directory / SUITE
    finally:
        shutil.rmtree(directory)


def add_interpreter(folder: Path, directory: Path) -> None:
    """Unpack the interpreter to /python."""
    download(INTERPRETER, directory)
    (package,) = directory.glob("*.whl")
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("x86_64.tar.xz"))
        packed = archive.extract(name, directory)
    with tarfile.open(packed) as archive:
        archive.extractall(folder / "python", filter="tar")


def download(requirements: str, target: Path, *options: str) -> None:
    """Download wheels, of which each requirement has the hash."""
    target.mkdir(exist_ok=True)
    (target / "requirements.txt").write_text(requirements, encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps")
    run(*pip, "--require-hashes", "-d", str(target), "-r", str(target / "requirements.txt"), *options)


def run_inside(folder: Path, *command: str) -> str:
    """Run a command in the folder, without a network; return what it printed."""
    enter = (
        'mount -t proc proc "$0/proc"; mount --bind /dev "$0/dev"; ip link set lo up;'
        ' exec chroot "$0" env -i PATH=/python/bin HOME=/tmp "$@"'
    )
    namespaces = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child")
    done = subprocess.run(
        [*namespaces, "sh", "-ec", enter, str(folder), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.needs("ip")
def test_release_wheel_serves_on_an_old_glibc(wheel: Path, folder: Path) -> None:
    download(requirements_for(PYTHON), folder / "wheels", *download_options(PYTHON, "x86_64", GLIBC[1]))
    shutil.copy(wheel, folder / "wheels")

    install = ("python3", "-m", "pip", "install", "-q", "--no-index", "--find-links", "/wheels")
    run_inside(folder, *install, "torchperfd[web,s3,otlp]")
    assert "hooks native" in run_inside(folder, "python3", "-m", "torchperfd", "version")
    printed = run_inside(folder, "python3", "-c", PROGRAM)
    assert f"glibc {'.'.join(map(str, GLIBC))}" in printed
    assert "torchperfd_build_info{" in printed
