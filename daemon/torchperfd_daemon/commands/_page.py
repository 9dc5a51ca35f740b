"""``--html FILE`` of commands: a page that opens from disk."""

from pathlib import Path

import click

from torchperfd.v1.access import write_file
from torchperfd_daemon.errors import TorchperfdError

html_option = click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page to FILE that opens from disk, without a request.",
)


def write_page(file: Path, page: str, hint: str = "") -> None:
    """Write a page to a file, and print its size on stderr.

    Args:
        hint: What else the reader may want, in a few words.

    Raises:
        TorchperfdError: It cannot be written.
    """
    try:
        write_file(file, page.encode())
    except OSError as error:
        raise TorchperfdError(
            f"cannot write {file}: {error.strerror or error}", "name another file"
        ) from None
    more = f"; {hint}" if hint else ""
    click.echo(f"torchperfd: wrote {file} ({len(page) / 1e6:.1f} MB), a page for any browser{more}", err=True)
