"""Build what a release publishes: two wheels, the source distribution, an SBOM and the checksums.

    python -m tools.release.build [DIRECTORY]

Builds HEAD from a clean clone, so that files that are edited or ignored do not get in. zig's C compiler, a
Python package, compiles for both machines and for an old glibc, whatever system this runs on. The tools are
those of ``locks/release.txt``, the dependencies in the SBOM those of ``locks/runtime.txt``.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

GLIBC: Final = (2, 17)
"""The oldest glibc that the wheels run on, which is that of CentOS 7."""

MACHINES: Final = ("x86_64", "aarch64")
"""Machines with a wheel. torch has no wheels for musl, so torchperfd has none either."""

CHECKSUMS: Final = "SHA256SUMS"
SBOM: Final = "torchperfd.cdx.json"


class ToolError(Exception):
    """A tool failed; the message has its command and what it printed."""


def build(target: Path) -> None:
    """Build all files of a release of HEAD into a directory, which is emptied first.

    Raises:
        ToolError: A tool failed; the message has what it printed.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="torchperfd-release-") as temporary:
        clone = Path(temporary, "clone")
        run("git", "clone", "-q", str(ROOT), str(clone))
        build_distribution(clone, target, "--sdist")
        for machine in MACHINES:
            build_wheel(clone, machine, target)
        environment = Path(temporary, "environment")
        dependencies = Path(temporary, "dependencies")
        download_dependencies(dependencies)
        install_offline(wheel_of(target, "x86_64"), dependencies, environment)
        write_sbom(environment, target / SBOM)
    write_checksums(target)


def build_wheel(tree: Path, machine: str, target: Path, **environ: str) -> None:
    """Build the wheel for a machine from a checkout or an unpacked source distribution.

    Args:
        tree: The sources; compiled modules are written into them.
        machine: One of :data:`MACHINES`.
        target: Directory of the wheel.
        environ: More environment variables.
    """
    glibc = ".".join(map(str, GLIBC))
    variables = {
        # Debugging information has the paths of the build, so that no two wheels would have the same bytes.
        "CC": f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{glibc} -g0",
        "TORCHPERFD_REQUIRE_NATIVE": "1",
        # What sysconfig reports as the platform, from which the build makes the wheel's tag.
        "_PYTHON_HOST_PLATFORM": f"manylinux_{'_'.join(map(str, GLIBC))}_{machine}",
    }
    build_distribution(tree, target, "--wheel", **variables | environ)


def build_distribution(tree: Path, target: Path, kind: str, **environ: str) -> None:
    """Build the wheel or the source distribution of a tree with the build tools of this environment.

    Args:
        tree: The sources.
        target: Directory of the file.
        kind: ``--wheel`` or ``--sdist``.
        environ: More environment variables.
    """
    # The same commit gives the same bytes.
    time = run("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()
    command = (sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", str(target), str(tree))
    run(*command, environ=os.environ | {"SOURCE_DATE_EPOCH": time} | environ)


def wheel_of(directory: Path, machine: str) -> Path:
    """Return the wheel for a machine."""
    (wheel,) = directory.glob(f"*_{machine}.whl")
    return wheel


def download_dependencies(target: Path) -> None:
    """Download the wheels of all dependencies that ``locks/runtime.txt`` names, and compare their hashes."""
    run(*_pip(), "download", "-q", "--require-hashes", "--only-binary=:all:", "-d", str(target),
        "-r", str(ROOT / "locks" / "runtime.txt"))  # fmt: skip


def install_offline(wheel: Path, dependencies: Path, environment: Path) -> None:
    """Install a wheel in a new virtual environment, without a network and without a compiler.

    Args:
        wheel: The wheel.
        dependencies: Directory with the wheels of its dependencies.
        environment: Directory of the virtual environment, which must not exist.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = str(environment / "bin" / "python")
    command = (*_pip(), "--python", python, "install", "-q", "--no-index", "--find-links", str(dependencies))
    run(*without_network(), *command, f"{wheel}[web,s3,otlp]", environ=bare(environment))


def without_network() -> tuple[str, ...]:
    """Return the beginning of a command that runs the rest in a network namespace without interfaces."""
    program = shutil.which("unshare") or "unshare"
    return (program, "--net") if os.geteuid() == 0 else (program, "--user", "--map-root-user", "--net")


def bare(environment: Path) -> dict[str, str]:
    """Return environment variables with which only the programs of a virtual environment are found."""
    return {"PATH": str(environment / "bin"), "HOME": str(environment), "PIP_CONFIG_FILE": os.devnull}


def write_sbom(environment: Path, target: Path) -> None:
    """Write a CycloneDX document of torchperfd and what else is in its virtual environment, with licences."""
    python = str(environment / "bin" / "python")
    run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--spec-version", "1.6",
        "--output-format", "JSON", "--output-file", str(target), python)  # fmt: skip
    document = json.loads(target.read_text(encoding="utf-8"))
    (subject,) = (each for each in document["components"] if each["name"] == "torchperfd")
    document["components"].remove(subject)
    # Without the path of the wheel on this machine.
    document["metadata"]["component"] = {key: subject[key] for key in subject if key != "externalReferences"}
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_checksums(directory: Path) -> None:
    """Write the SHA-256 of each file of a directory in the format of ``sha256sum``."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def run(*command: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its output.

    Raises:
        ToolError: It failed; the message has what it printed.
    """
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise ToolError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def _pip() -> tuple[str, ...]:
    return (sys.executable, "-m", "pip", "--disable-pip-version-check")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the files of a release.")
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "dist")
    try:
        build(parser.parse_args().directory.resolve())
    except ToolError as error:
        sys.exit(str(error))
