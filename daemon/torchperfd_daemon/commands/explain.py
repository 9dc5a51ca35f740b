"""``torchperfd explain``."""

import re
from pathlib import Path
from typing import Final

import click

from torchperfd_daemon.commands._fit import fitted
from torchperfd_daemon.commands._shipped import shipped_folders
from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.errors import TorchperfdError

# A link's address leads into the documentation, which is not there in a terminal; its words remain.
_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@click.command("explain")
@click.argument("cause", required=False, type=click.Choice([cause.slug for cause in Cause]))
def command(cause: str | None) -> None:
    """Explain a cause of lost time: what it means, how to confirm it, and the fix.

    Without CAUSE, list all causes.
    """
    click.echo(page_text(cause) if cause else _list_text())


def page_text(slug: str) -> str:
    """Return the page on a cause as plain text, without a last newline.

    Raises:
        TorchperfdError: The package was installed without its pages.
    """
    return _LINK.sub(r"\1", _page(slug).read_text(encoding="utf-8")).rstrip()


def _list_text() -> str:
    heads = ("CAUSE", "MEANING")
    _, *lines = fitted(
        heads, [(each.slug, _first_sentence(each.slug)) for each in Cause], left=heads, fold="MEANING"
    )
    return "\n".join(lines)


def _first_sentence(slug: str) -> str:
    """Return the first sentence of what a cause means, up to a colon that explains it."""
    meaning = page_text(slug).split("## Meaning\n", 1)[1].split("\n## ", 1)[0]
    return re.split(r"[.:](?:\s|$)", " ".join(meaning.split()), maxsplit=1)[0]


def _page(slug: str) -> Path:
    for folder in shipped_folders("causes", "docs/causes"):
        if (folder / f"{slug}.md").is_file():
            return folder / f"{slug}.md"
    raise TorchperfdError(
        "the pages on causes are not part of this installation", "install torchperfd from its wheel"
    )
