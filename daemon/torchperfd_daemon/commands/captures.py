"""``torchperfd captures``."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from torchperfd.v1 import contract
from torchperfd_daemon.captures import CaptureRecord, Catalog
from torchperfd_daemon.commands._options import json_option
from torchperfd_daemon.errors import TorchperfdError


@click.group("captures")
@click.option(
    "--captures-dir",
    type=click.Path(path_type=Path),
    envvar="TORCHPERFD_CAPTURES_DIR",
    help="The captures directory; this user's own by default.",
)
@click.pass_context
def command(context: click.Context, captures_dir: Path | None) -> None:
    """List, fetch and delete captures. Reads the directory itself; needs no daemon."""
    context.obj = Catalog(captures_dir or Path(contract.user_captures_dir()))


@command.command("list")
@json_option
@click.pass_obj
def list_captures(catalog: Catalog, as_json: bool) -> None:
    """List captures, newest first."""
    records = catalog.list()
    if as_json:
        document = {
            "schema": "torchperfd.captures/1",
            "directory": str(catalog.directory),
            "captures": [msgspec.to_builtins(record) for record in records],
        }
        click.echo(json.dumps(document))
        return
    if not records:
        click.echo(f"no captures in {catalog.directory}", err=True)
        return
    row = "{:<24} {:<28.28} {:<9} {:>12} {:>6} {:>10}  {}"
    click.echo(row.format("CAPTURE", "RUN", "STATE", "STEPS", "RANKS", "SIZE", "WHEN"))
    for record in records:
        click.echo(row.format(*_cells(record)))


@command.command("get")
@click.argument("capture_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory to copy into; the current one by default.",
)
@click.pass_obj
def get_capture(catalog: Catalog, capture_id: str, output: Path) -> None:
    """Copy a capture's traces and manifest, and print where they are."""
    record = catalog.get(capture_id)
    target = output / record.capture_id
    try:
        target.mkdir(parents=True)
        for path in catalog.folder(capture_id).iterdir():
            # Other users can write there: a link could lead to a file that is the caller's alone.
            if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                shutil.copyfile(path, target / path.name, follow_symlinks=False)
    except FileExistsError:
        raise TorchperfdError(f"{target} exists", "choose another directory with --output") from None
    except OSError as error:
        raise TorchperfdError(f"cannot copy to {target}: {error}") from error
    click.echo(target)


@command.command("rm")
@click.argument("capture_ids", nargs=-1, required=True)
@click.pass_obj
def remove_captures(catalog: Catalog, capture_ids: tuple[str, ...]) -> None:
    """Delete captures and their traces."""
    for capture_id in capture_ids:
        catalog.remove(capture_id)
        click.echo(f"deleted {capture_id}", err=True)


def _cells(record: CaptureRecord) -> list[Any]:
    steps = record.step_range
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.requested_at))
    size = sum(rank.bytes for rank in record.ranks)
    return [
        record.capture_id,
        "".join(character if character.isprintable() else "?" for character in record.run),
        record.state.value,
        f"{steps[0]}-{steps[1] - 1}" if steps else "-",
        str(len(record.ranks)),
        f"{size / 1e6:.1f} MB",
        when,
    ]
