"""``torchperfd version``."""

import platform
import sys
from importlib import metadata

import click

from torchperfd._version import __revision__, __version__, missing_native_modules
from torchperfd.v1 import contract
from torchperfd_cli.commands._options import json_option
from torchperfd_cli.commands._output import emit, plain

_DEPENDENCIES = ("grpcio", "protobuf", "torch")


@click.command("version")
@json_option
def version_command(as_json: bool) -> None:
    """Print the versions of torchperfd, of its protocol, and of its dependencies."""
    hooks = "reference" if missing_native_modules() else "native"
    dependencies = {name: _installed(name) for name in _DEPENDENCIES}
    document = {
        "schema": "torchperfd.version/1",
        "version": __version__,
        "revision": __revision__ or None,
        "api": {"min": contract.API_MIN, "max": contract.API_MAX},
        "python": platform.python_version(),
        "executable": sys.executable,
        "hooks": hooks,
        "dependencies": dependencies,
    }
    lines = plain(
        f"torchperfd {__version__} (protocol {contract.API_MIN}-{contract.API_MAX})",
        f"revision {__revision__ or 'unknown'}",
        f"Python {document['python']}",
        f"hooks {hooks}{'' if hooks == 'native' else ' (Python, slower: see `torchperfd doctor`)'}",
        *(f"{name} {version or 'not installed'}" for name, version in dependencies.items()),
    )
    emit(document if as_json else lines)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
