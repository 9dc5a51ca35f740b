"""``torchperfd version``."""

import json
import platform
import sys
from importlib import metadata

import click

from torchperfd._version import __revision__, __version__, missing_native_modules
from torchperfd.v1 import contract

_DEPENDENCIES = ("grpcio", "protobuf", "torch")


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def version_command(as_json: bool) -> None:
    """Print the versions of torchperfd, of its protocol, and of its dependencies."""
    hooks = "reference" if missing_native_modules() else "native"
    document = {
        "schema": "torchperfd.version/1",
        "version": __version__,
        "revision": __revision__ or None,
        "api": {"min": contract.API_MIN, "max": contract.API_MAX},
        "python": platform.python_version(),
        "executable": sys.executable,
        "hooks": hooks,
        "dependencies": {name: _installed(name) for name in _DEPENDENCIES},
    }
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(f"torchperfd {__version__} (protocol {contract.API_MIN}-{contract.API_MAX})")
    click.echo(f"revision {__revision__ or 'unknown'}")
    click.echo(f"Python {document['python']}")
    click.echo(f"hooks {hooks}{'' if hooks == 'native' else ' (Python, slower: see `torchperfd doctor`)'}")
    for name in _DEPENDENCIES:
        click.echo(f"{name} {_installed(name) or 'not installed'}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
