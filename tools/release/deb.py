"""Build Debian packages from the wheels of a release: one for each distribution and machine.

    python -m tools.release.deb [DIRECTORY]

Puts them beside the wheels and writes the checksums anew. A package has a virtual environment with the wheel
and with the dependencies that ``locks/runtime.txt`` names; the interpreter is the distribution's. pip
downloads wheels for the target, so any machine with dpkg-deb builds all of them.
"""

import argparse
import gzip
import hashlib
import os
import re
import shutil
import string
import sys
import tempfile
from email.utils import formatdate
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from tools.release.build import MACHINES, ROOT, ToolError, run, wheel_of, write_checksums

PYTHONS: Final = ("3.11", "3.12", "3.13")
"""The interpreters of Debian 12, Ubuntu 24.04 and Debian 13."""

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's names of machines."""

GLIBC_MINOR: Final = 36
"""Of Debian 12, the oldest of these distributions: newer wheels of dependencies do not get in."""

_RECIPE: Final = ROOT / "deploy" / "debian"
_UNITS: Final = ROOT / "deploy" / "systemd"
_SCRIPTS: Final = ("postinst", "prerm", "postrm")
_FILES: Final = {
    _RECIPE / "torchperfd": "usr/bin/torchperfd",
    _RECIPE / "config.toml": "etc/torchperfd/config.toml",
    _RECIPE / "lintian-overrides": "usr/share/lintian/overrides/torchperfd",
    _RECIPE / "copyright": "usr/share/doc/torchperfd/copyright",
    _UNITS / "torchperfd.service": "usr/lib/systemd/system/torchperfd.service",
    _UNITS / "torchperfd.sysusers.conf": "usr/lib/sysusers.d/torchperfd.conf",
    _UNITS / "torchperfd.tmpfiles.conf": "usr/lib/tmpfiles.d/torchperfd.conf",
    _UNITS / "torchperfd-ptrace.conf": "usr/share/doc/torchperfd/examples/torchperfd-ptrace.conf",
}


def build_packages(directory: Path) -> None:
    """Build a package for each Python and machine from the wheels in a directory, into it.

    Raises:
        ToolError: A tool failed, or a release has no maintainer; the message has the reason.
    """
    check_maintainer(wheel_of(directory, MACHINES[0]).name.split("-")[1])
    for machine in MACHINES:
        for python in PYTHONS:
            print(build_package(wheel_of(directory, machine), python, directory).name, flush=True)
    write_checksums(directory)


def build_package(wheel: Path, python: str, target: Path) -> Path:
    """Build one package and return its file.

    Args:
        wheel: The wheel of torchperfd, whose name has the machine.
        python: One of :data:`PYTHONS`.
        target: Directory of the file.
    """
    (machine,) = (each for each in MACHINES if wheel.stem.endswith(each))
    version = f"{debian_version(wheel.name.split('-')[1])}-1+py{python}"
    time = run("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory(prefix="torchperfd-deb-") as temporary:
        tree = Path(temporary, "tree")
        _write_environment(tree / "usr" / "lib" / "torchperfd", wheel, machine, python)
        for source, place in _FILES.items():
            _copy(source, tree / place)
        _write_documents(tree / "usr" / "share", version, int(time))
        _set_modes(tree)
        _write_control(tree, version=version, architecture=ARCHITECTURES[machine], python=python)
        package = target / f"torchperfd_{version}_{ARCHITECTURES[machine]}.deb"
        # xz takes twenty times as long for an eighth less; dpkg of all these distributions reads zstd.
        run("dpkg-deb", "--root-owner-group", "-Zzstd", "--build", str(tree), str(package),
            environ=os.environ | {"SOURCE_DATE_EPOCH": time})  # fmt: skip
    return package


def check_maintainer(version: str) -> None:
    """Refuse packages of a release whose maintainer is the placeholder of this repository.

    Raises:
        ToolError: They would name an address that cannot exist.
    """
    if ".dev" not in version and _maintainer().endswith(".invalid>"):
        raise ToolError(
            f"{_RECIPE.relative_to(ROOT)}/control: replace the placeholder {_maintainer()} by the Maintainer"
            f" of the packages of {version}"
        )


def debian_version(version: str) -> str:
    """Return a version in Debian's form, which orders a development version before its release."""
    return version.replace(".dev", "~dev")


def _write_environment(target: Path, wheel: Path, machine: str, python: str) -> None:
    """Write a virtual environment of the distribution's interpreter, which need not be on this machine."""
    packages = target / "lib" / f"python{python}" / "site-packages"
    packages.mkdir(parents=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile",
           "--target", str(packages), *download_options(python, machine))  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as requirements:
        requirements.write(requirements_for(python))
        requirements.flush()
        run(*pip, "--require-hashes", "-r", requirements.name)
    run(*pip, str(wheel))
    # Commands of dependencies, whose first line names the interpreter of this machine.
    shutil.rmtree(packages / "bin", ignore_errors=True)
    (target / "bin").mkdir()
    (target / "bin" / "python3").symlink_to(f"../../../bin/python{python}")
    settings = string.Template((_RECIPE / "pyvenv.cfg").read_text(encoding="utf-8"))
    (target / "pyvenv.cfg").write_text(settings.substitute(python=python), encoding="utf-8")


def download_options(python: str, machine: str, glibc_minor: int = GLIBC_MINOR) -> list[str]:
    """Return pip's options for wheels of a Python, a machine and a glibc that need not be this machine's."""
    tags = [f"manylinux_2_{minor}" for minor in range(glibc_minor, 4, -1)]
    tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    platforms = (word for tag in tags for word in ("--platform", f"{tag}_{machine}"))
    return ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]


def requirements_for(python: str) -> str:
    """Return what ``locks/runtime.txt`` has for a Python; pip itself would ask the one that runs it."""
    lines = list[str]()
    wanted = True
    for line in (ROOT / "locks" / "runtime.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([\w.-]+==\S+)(?: ; (.+))? \\$", line):
            wanted = not found[2] or Marker(found[2]).evaluate({"python_full_version": f"{python}.0"})
            line = f"{found[1]} \\"
        if wanted:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _write_documents(share: Path, version: str, time: int) -> None:
    documents = {
        "man/man1/torchperfd.1.gz": (ROOT / "deploy" / "man" / "torchperfd.1").read_text(encoding="utf-8"),
        "doc/torchperfd/changelog.gz": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "doc/torchperfd/changelog.Debian.gz": (
            f"torchperfd ({version}) stable; urgency=medium\n\n  * changelog.gz has the changes.\n\n"
            f" -- {_maintainer()}  {formatdate(time)}\n"
        ),
    }
    for name, text in documents.items():
        file = share / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _write_control(tree: Path, **values: str) -> None:
    """Write what dpkg reads: fields, checksums, the list of configuration files, and the scripts."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    control = tree / "DEBIAN"
    control.mkdir()
    size = sum(path.stat().st_size for path in files) // 1024
    text = string.Template(_control_template()).substitute(values, kibibytes=size)
    (control / "control").write_text(text, encoding="utf-8")
    sums = (hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() for path in files)
    lines = (f"{each}  {path.relative_to(tree)}\n" for each, path in zip(sums, files, strict=True))
    (control / "md5sums").write_text("".join(lines), encoding="utf-8")
    configuration = (f"/{path.relative_to(tree)}\n" for path in files if path.is_relative_to(tree / "etc"))
    (control / "conffiles").write_text("".join(configuration), encoding="utf-8")
    for script in _SCRIPTS:
        _copy(_RECIPE / script, control / script)


def _control_template() -> str:
    return (_RECIPE / "control").read_text(encoding="utf-8")


def _maintainer() -> str:
    (maintainer,) = re.findall("^Maintainer: (.+)$", _control_template(), re.MULTILINE)
    return str(maintainer)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _set_modes(tree: Path) -> None:
    """Give files and directories the modes that they have in packages, whatever this machine's umask is."""
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the Debian packages of a release.")
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "dist")
    try:
        build_packages(parser.parse_args().directory.resolve())
    except ToolError as error:
        sys.exit(str(error))
