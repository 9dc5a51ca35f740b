"""Check the files of a release before they are published.

    python -m tools.release.check [DIRECTORY]

Prints one line for each check that passed, and ends with the first that did not.
"""

import argparse
import contextlib
import hashlib
import json
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.utils import canonicalize_name
from tools.release.build import (
    CHECKSUMS,
    GLIBC,
    MACHINES,
    ROOT,
    SBOM,
    ToolError,
    bare,
    build_wheel,
    download_dependencies,
    install_offline,
    run,
    wheel_of,
    without_network,
)

NATIVE: Final = {
    "torchperfd/events/_native.abi3.so",
    "torchperfd/steps/_templates.abi3.so",
    "torchperfd/launch/_sigterm.abi3.so",
    "torchperfd_daemon/analysis/_native.abi3.so",
}
LIBRARIES: Final = {"libc.so.6", "libpthread.so.0", "librt.so.1", "libdl.so.2", "libm.so.6"}
"""What a compiled module may load: parts of glibc, which every such system has."""

ELF_MACHINES: Final = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


class CheckError(Exception):
    """A file must not be published; the message has the reason."""


def check_files(directory: Path) -> None:
    """The directory has the files of one version, and no others."""
    (sdist,) = directory.glob("*.tar.gz")
    name = sdist.name.removesuffix(".tar.gz")
    glibc = "_".join(map(str, GLIBC))
    expected = {sdist.name, SBOM, CHECKSUMS} | {
        f"{name}-cp311-abi3-manylinux_{glibc}_{machine}.whl" for machine in MACHINES
    }
    _require({file.name for file in directory.iterdir()} == expected, f"expected {sorted(expected)}")


def check_checksums(directory: Path) -> None:
    """The checksums are those of all files."""
    lines = (directory / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    listed = {line.split("  ")[1] for line in lines}
    files = {file.name for file in directory.iterdir()} - {CHECKSUMS}
    _require(listed == files, f"{CHECKSUMS} lists {sorted(listed)}")
    for line in lines:
        digest, name = line.split("  ")
        found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        _require(found == digest, f"{name} does not have the digest in {CHECKSUMS}")


def check_metadata(directory: Path) -> None:
    """A package index accepts wheels and source distribution, and shows their README."""
    files = [*directory.glob("*.whl"), *directory.glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))


def check_stable_abi(directory: Path) -> None:
    """The compiled modules use only what CPython 3.11 and all later ones have."""
    run(sys.executable, "-m", "abi3audit", "--strict", *map(str, directory.glob("*.whl")))


def check_modules(directory: Path) -> None:
    """The compiled modules are all there, for the machine and the glibc that the wheel's name promises."""
    for machine in MACHINES:
        with zipfile.ZipFile(wheel_of(directory, machine)) as archive:
            modules = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
        _require(set(modules) == NATIVE, f"the wheel for {machine} has {sorted(modules)}")
        for name, content in modules.items():
            with ELFFile(BytesIO(content)) as elf:
                _require(elf["e_machine"] == ELF_MACHINES[machine], f"{name} is for {elf['e_machine']}")
                newer = {version for version in _versions(elf) if version > GLIBC}
                _require(not newer, f"{name} for {machine} needs glibc {newer}")
                loaded = set(_libraries(elf))
                _require(loaded <= LIBRARIES, f"{name} for {machine} loads {sorted(loaded - LIBRARIES)}")


def check_platform(directory: Path) -> None:
    """auditwheel, which knows the policies of all tags, finds the same tag as the wheel's name has."""
    for machine in MACHINES:
        wheel = wheel_of(directory, machine)
        found = run(sys.executable, "-m", "auditwheel", "show", str(wheel))
        tag = f"manylinux_{'_'.join(map(str, GLIBC))}_{machine}"
        _require(f'platform tag: "{tag}"' in " ".join(found.split()), found)


def check_source_distribution(directory: Path) -> None:
    """The source distribution builds wheels with the same files, byte for byte."""
    with _unpacked(directory) as tree:
        for machine in MACHINES:
            build_wheel(tree, machine, tree)
            differ = _record(wheel_of(tree, machine)) ^ _record(wheel_of(directory, machine))
            _require(not differ, f"the wheels for {machine} differ in {sorted(differ)}")


def check_failing_compiler(directory: Path) -> None:
    """A build whose compiler fails makes no wheel."""
    with _unpacked(directory) as tree:
        try:
            build_wheel(tree, "x86_64", tree, CC="false")
        except ToolError as error:
            _require("TORCHPERFD_REQUIRE_NATIVE=1, but" in str(error), f"another reason: {error}")
        else:
            raise CheckError("a wheel without C modules was built")


def check_installation(directory: Path) -> None:
    """The wheel for this machine installs and starts without network and compiler, with compiled hooks."""
    wheel = wheel_of(directory, "x86_64")
    with tempfile.TemporaryDirectory(prefix="torchperfd-release-") as temporary:
        dependencies, environment = Path(temporary, "dependencies"), Path(temporary, "environment")
        download_dependencies(dependencies)
        install_offline(wheel, dependencies, environment)
        printed = run(*without_network(), str(environment / "bin" / "torchperfd"), "version",
                      environ=bare(environment))  # fmt: skip
        modules = ", ".join(name.split(".")[0].replace("/", ".") for name in sorted(NATIVE))
        run(str(environment / "bin" / "python"), "-c", f"import {modules}", environ=bare(environment))
    version = wheel.name.split("-")[1]
    commit = run("git", "-C", str(ROOT), "rev-parse", "HEAD")[:12]
    for expected in (f"torchperfd {version} ", f"revision {commit}\n", "hooks native\n"):
        _require(expected in printed, f"no {expected!r} in {printed!r}")


def check_sbom(directory: Path) -> None:
    """The SBOM is valid CycloneDX, and has this version and its direct dependencies."""
    text = (directory / SBOM).read_text(encoding="utf-8")
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    _require(error is None, f"{SBOM}: {error}")
    document = json.loads(text)
    subject = document["metadata"]["component"]
    wheel = wheel_of(directory, "x86_64")
    _require(subject["version"] == wheel.name.split("-")[1], f"{SBOM} is of {subject['version']}")
    components = {canonicalize_name(each["name"]) for each in document["components"]}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", described, re.MULTILINE)
    lacking = {name for name in required if canonicalize_name(name) not in components}
    _require(bool(required) and not lacking, f"{SBOM} lacks {sorted(lacking)}")
    _require("file://" not in text, f"{SBOM} has paths of this machine")


CHECKS: Final[tuple[Callable[[Path], None], ...]] = (
    check_files,
    check_checksums,
    check_metadata,
    check_modules,
    check_stable_abi,
    check_platform,
    check_installation,
    check_sbom,
    check_source_distribution,
    check_failing_compiler,
)


@contextlib.contextmanager
def _unpacked(directory: Path) -> Iterator[Path]:
    """Unpack the source distribution into a temporary directory."""
    (sdist,) = directory.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="torchperfd-release-") as temporary:
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, filter="data")
        yield Path(temporary, sdist.name.removesuffix(".tar.gz"))


def _versions(elf: ELFFile) -> Iterator[tuple[int, ...]]:
    """Yield the versions of glibc whose symbols a module needs."""
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, needed in section.iter_versions():
                for each in needed:
                    if found := re.fullmatch(r"GLIBC_([\d.]+)", each.name):
                        yield tuple(map(int, found[1].split(".")))


def _libraries(elf: ELFFile) -> Iterator[str]:
    """Yield the libraries that a module loads."""
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags("DT_NEEDED"):
                yield tag.needed


def _record(wheel: Path) -> set[str]:
    """Return the lines of a wheel's list of files: each with its name, hash and size."""
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        return set(archive.read(record).decode().splitlines())


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise CheckError(reason)


def main() -> None:
    """Run all checks.

    Raises:
        SystemExit: One failed; the message has which, and why.
    """
    parser = argparse.ArgumentParser(description="Check the files of a release.")
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "dist")
    directory = parser.parse_args().directory.resolve()
    for check in CHECKS:
        text = (check.__doc__ or "").removesuffix(".")
        try:
            check(directory)
        except (CheckError, ToolError) as error:
            sys.exit(f"FAILED: {text}: {error}")
        print(f"✓ {text}", flush=True)


if __name__ == "__main__":
    main()
