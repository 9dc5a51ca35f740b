"""``torchperfd open`` of the live page, and ``torchperfd dashboards``.

Dashboards are the files in the package, narrowed to the series with some labels.
"""

import html
import json
import posixpath
import re
import webbrowser
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

import torchperfd_daemon
from torchperfd.v1 import access, contract
from torchperfd.v1.access import write_file
from torchperfd_cli.commands._daemon import connect, find_daemon
from torchperfd_cli.commands._options import Parsed, complete_runs, socket_option
from torchperfd_cli.commands._output import emit, note, plain
from torchperfd_cli.commands._scope import whole_run
from torchperfd_daemon.captures.folder import write
from torchperfd_daemon.errors import TorchperfdError, explained
from torchperfd_daemon.web.access import read_token

_PAGE = "open.html"


@click.command("open")
@click.option("--run", default="", shell_complete=complete_runs, help="Show this run first.")
@click.option(
    "--print-url",
    is_flag=True,
    help="Print the address, and open nothing. The token is in it.",
)
@socket_option
def open_command(run: str, print_url: bool, socket: str | None) -> None:
    """Open the daemon's live page in a browser, with the token that starting captures needs.

    The token is in the address's fragment, which browsers do not send. From another machine, forward the
    port with `ssh -L 9407:127.0.0.1:9407 NODE`, and open what `--print-url` prints.
    """
    url = page_url(socket, run)
    if print_url:
        emit(plain(url))
    elif webbrowser.open(_private_page(url).as_uri()):
        note(f"opened {url.partition('#')[0]}")
    else:
        raise TorchperfdError(
            "no browser can be started here", "open the address of `torchperfd open --print-url`"
        )


def page_url(socket: str | None, run: str = "") -> str:
    """Return the page's address, with the token.

    Raises:
        TorchperfdError: No daemon answers, or this user may not read its token.
    """
    path, metrics_url, name = _daemon(socket, run)
    view = f"runs/{quote(name, safe='')}" if name else ""
    return f"{metrics_url.removesuffix('metrics')}{view}#token={read_token(path)}"


def _private_page(url: str) -> Path:
    """Write a page that leads to an address, for this user alone.

    Other users can see a browser's command line, so the token must not be on it.
    """
    path = Path(contract.user_runtime_dir()) / _PAGE
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">'
    with (
        explained(f"cannot write {path}", "use `torchperfd open --print-url`"),
        access.opened_directory(str(path.parent), create=True) as directory,
    ):
        write(directory, _PAGE, page.encode())
    return path


def _daemon(socket: str | None, run: str) -> tuple[str, str, str]:
    """Return the socket of the first daemon that answers, its metrics page, and a run's whole name."""
    path, info = find_daemon(socket)
    with connect(path) as daemon:
        return path, info.metrics_url, whole_run(daemon, run)


_MATCHERS: Final = re.compile(
    r"""\s*[a-zA-Z_]\w*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"\s*(?:,\s*(?=[a-zA-Z_])|$)""", re.ASCII
)
# Series of recording rules have a colon in their names, and no labels besides those that they are grouped by.
_SERIES: Final = re.compile(r"(?<![\w:])(torchperfd_\w+|up(?=\{))(?![\w:])(\{)?", re.ASCII)
_QUERIES: Final = ("expr", "query", "definition")
_EXPRESSION: Final = re.compile(r"^(?P<indent> *)expr: \|\n(?P<lines>(?:(?P=indent) +.*\n)+)", re.MULTILINE)


def _matchers(text: str) -> str:
    text = text.strip()
    position = 0
    while position < len(text) or not text:
        match = _MATCHERS.match(text, position)
        if match is None:
            raise ValueError(f'{text[:80]!r} has no matchers such as cluster="one"')
        position = match.end()
    return text


def narrow_query(query: str, selector: str) -> str:
    """Return a query in PromQL, in which all metrics of torchperfd and of its scrapes have the matchers."""
    return _SERIES.sub(lambda found: f"{found[1]}{{{selector}{',' if found[2] else '}'}", query)


def narrow_dashboard(text: str, selector: str) -> str:
    return json.dumps(_narrowed(json.loads(text), selector), indent=2, sort_keys=True) + "\n"


def narrow_rules(text: str, selector: str) -> str:
    """Return the file of rules with narrowed expressions."""

    def narrowed(found: re.Match[str]) -> str:
        return f"{found['indent']}expr: |\n{narrow_query(found['lines'], selector)}"

    return _EXPRESSION.sub(narrowed, text)


def _narrowed(part: Any, selector: str) -> Any:
    if isinstance(part, dict):
        return {
            name: narrow_query(value, selector)
            if name in _QUERIES and isinstance(value, str)
            else _narrowed(value, selector)
            for name, value in part.items()
        }
    return [_narrowed(each, selector) for each in part] if isinstance(part, list) else part


LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
"""A link in a Markdown page: its text and its target."""


def shipped_folder(name: str) -> Path:
    """Return a folder that comes with the package, else that of a checkout; it may not exist."""
    package = Path(torchperfd_daemon.__file__).parent
    return package / name if (package / name).is_dir() else package.parents[1] / name


_RUNBOOK: Final = re.compile(
    r"runbook(?:_url)?: (?:\S+?/)??((?:causes/)?[\w-]+)\.(?:md|html)(#\w+)$", re.MULTILINE
)
_PROMETHEUS: Final = "http://prometheus:9090"
_MOUNTED: Final = "/var/lib/grafana/dashboards"
_SHIPPED: Final = ("dashboards/*.json", "alerts/*.rules.yaml", "provisioning/*/*.yaml")
_PAGES: Final = ("runbooks.md", "causes/*.md")
_PAGES_FOLDER: Final = "runbooks"


@click.group("dashboards")
def dashboards_command() -> None:
    """Write the dashboards for Grafana and the rules for Prometheus."""


@dashboards_command.command("export")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--prometheus", metavar="URL", default=_PROMETHEUS, show_default=True, help="Grafana's data source."
)
@click.option(
    "--mount", metavar="PATH", help="Where Grafana sees the dashboards (default: where they are written)."
)
@click.option("--runbooks", metavar="URL", help="Where you publish the alerts' pages as HTML.")
@click.option(
    "--selector",
    type=Parsed("selector", _matchers),
    metavar="MATCHERS",
    help="Only series with these labels, in all queries and rules, such as 'cluster=\"one\"'.",
)
def export(
    directory: Path, prometheus: str, mount: str | None, runbooks: str | None, selector: str | None
) -> None:
    """Write dashboards, rules, provisioning and the alerts' pages (runbooks) into DIRECTORY.

    Files of the same names are overwritten. Prints each file that was written.
    """
    mounted = mount or str((directory / "dashboards").absolute())
    for name, text in shipped_files().items():
        if name.startswith("alerts/"):
            text = narrow_rules(text, selector) if selector else text
            text = _with_addresses(text, runbooks) if runbooks else text
        elif name.startswith("dashboards/") and selector:
            text = narrow_dashboard(text, selector)
        elif name.startswith("provisioning/"):
            text = text.replace(_PROMETHEUS, prometheus).replace(_MOUNTED, mounted)
        path = directory / name
        with explained(f"cannot write {path}", "name a directory that you may write to"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text.encode())
        emit(plain(str(path)))
    if not runbooks:
        note(
            f"alerts have no runbook_url: publish {directory / _PAGES_FOLDER} as HTML, and export with"
            " --runbooks URL, its address"
        )


def _with_addresses(rules: str, runbooks: str) -> str:
    """Return rules whose alerts have the addresses of their sections, below that of the pages."""
    address = runbooks.rstrip("/")
    return _RUNBOOK.sub(lambda found: f"runbook_url: {address}/{found[1]}.html{found[2]}", rules)


def shipped_files() -> dict[str, str]:
    """Return the text of each file that comes with the package, by its path in the export.

    Raises:
        TorchperfdError: The package was installed without them.
    """
    files = _texts(shipped_folder("grafana"), _SHIPPED)
    pages = _texts(shipped_folder("docs"), _PAGES)
    if not files or not pages:
        raise TorchperfdError(
            "the dashboards are not part of this installation", "install torchperfd from its wheel"
        )
    for name, text in pages.items():
        files[f"{_PAGES_FOLDER}/{name}"] = _with_exported_links(name, text, pages)
    return dict(sorted(files.items()))


def _texts(folder: Path, patterns: Collection[str]) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for pattern in patterns
        for path in folder.glob(pattern)
    }


def _with_exported_links(name: str, text: str, exported: Collection[str]) -> str:
    """Return a page in which only links to exported pages remain; other links become their text."""

    def kept(link: re.Match[str]) -> str:
        page = link[2].partition("#")[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), page)) if page else name
        return link[0] if "://" in page or target in exported else link[1]

    return LINK.sub(kept, text)
