"""``torchperfd captures``."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from torchperfd.document.blocks import Document, FirstThatFits
from torchperfd.document.tables import Table
from torchperfd.model.formatting import did_you_mean
from torchperfd.v1 import control_pb2
from torchperfd_cli.commands._capture_catalog import (
    DaemonCatalog,
    captures_dir_option,
    open_catalog,
    own_directory,
)
from torchperfd_cli.commands._daemon import connect
from torchperfd_cli.commands._options import (
    AGE,
    MOMENT,
    complete_captures,
    json_option,
    limit_option,
    socket_option,
)
from torchperfd_cli.commands._output import Answer, emit, limit_notes, note, plain, show, watch_option
from torchperfd_cli.commands._scope import capture_argument
from torchperfd_daemon.captures.catalog import Catalog
from torchperfd_daemon.captures.destination import Destination, read_upload_marker
from torchperfd_daemon.captures.index import Listed, Query
from torchperfd_daemon.captures.manifest import CaptureRecord, CaptureState, Upload
from torchperfd_daemon.captures.uploader import upload
from torchperfd_daemon.errors import DaemonUnreachableError, DeadlineError, TorchperfdError
from torchperfd_daemon.views.documents import listing_dict, uploaded
from torchperfd_daemon.views.model import whole_name

AnyCatalog = Catalog | DaemonCatalog

_ROWS: Final = 100
_CANCEL_S: Final = 10.0

captures_argument = click.argument(
    "capture_ids", nargs=-1, required=True, callback=capture_argument, shell_complete=complete_captures
)


@click.group("captures", invoke_without_command=True)
@captures_dir_option
@click.pass_context
def captures_command(context: click.Context, captures_dir: Path | None) -> None:
    """List, fetch, pin and delete captures: those of the daemon, else those in this user's own directory.

    Without a command, list the captures, newest first; `torchperfd captures list` has options for it.
    """
    context.obj = open_catalog(captures_dir)
    if context.invoked_subcommand is None:
        context.invoke(list_captures)


@captures_command.command("list")
@click.option("--run", default="", help="Only captures of this run.")
@click.option(
    "--state",
    type=click.Choice([state.value for state in CaptureState]),
    help="Only captures in this state.",
)
@click.option("--since", type=MOMENT, default=0.0, help="Only captures from then on: 2d, 2026-07-01T12:00.")
@limit_option(_ROWS)
@watch_option
@json_option
@click.pass_context
def list_captures(
    context: click.Context,
    run: str,
    state: str | None,
    since: float,
    limit: int | None,
    watch: bool,
    as_json: bool,
) -> None:
    """List captures, newest first."""
    show(lambda: _list(context, run, state, since, limit, as_json=as_json), watch=watch, as_json=as_json)


def _list(
    context: click.Context, run: str, state: str | None, since: float, limit: int | None, *, as_json: bool
) -> Answer:
    catalog: AnyCatalog = context.obj
    named = context.parent is not None and context.parent.params["captures_dir"] is not None
    if limit is None:
        limit = 0 if as_json else _ROWS
    hint = ""
    if run:
        runs = {each.record.run for each in catalog.list(Query()).captures}
        run = whole_name(run, runs, "run")
        hint = did_you_mean(run, runs) if run not in runs else ""
    query = Query(run=run, state=CaptureState(state) if state else None, since=since, limit=limit)
    listing = catalog.list(query)
    if as_json:
        return Answer(listing_dict(catalog, listing))
    own = own_directory()
    notes: list[str] = []
    if not named and catalog.directory != own and any(own.glob("*/")):
        notes.append(f"captures of the daemon, in {catalog.directory}; yours: --captures-dir {own}")
    if not listing.captures:
        such = "such " if query != Query(limit=limit) else ""
        notes.append(f"no {such}captures in {catalog.directory}" + (f"; --run: {hint}" if hint else ""))
        return Answer(notes=notes)
    table = captures_table(listing.captures, uploads=catalog.uploads)
    return Answer(Document([[table]]), [*notes, *limit_notes(len(listing.captures), listing.total)])


@captures_command.command("get")
@click.argument("capture_id", callback=capture_argument, shell_complete=complete_captures)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory to copy into; the current one by default.",
)
@click.option(
    "--remote", is_flag=True, help="Through the daemon; --socket implies it. Resumes an interrupted download."
)
@socket_option
@click.pass_context
def get_capture(
    context: click.Context, capture_id: str, output: Path, remote: bool, socket: str | None
) -> None:
    """Copy a capture's traces and manifest, and print where they are."""
    catalog: AnyCatalog = context.obj
    target = output / catalog.folder(capture_id).name
    # A socket from the environment names a daemon, but does not request a download through it.
    if remote or context.get_parameter_source("socket") is ParameterSource.COMMANDLINE:
        _download(DaemonCatalog(catalog.directory, socket), capture_id, target)
    elif isinstance(catalog, DaemonCatalog):
        _download(catalog, capture_id, target)
    else:
        _copy(catalog, capture_id, target)
    emit(plain(str(target)))


@captures_command.command("show")
@click.argument("capture_id", callback=capture_argument, shell_complete=complete_captures)
@json_option
@click.pass_obj
def show_capture(catalog: AnyCatalog, capture_id: str, as_json: bool) -> None:
    """Print the daemon's analysis of a capture."""
    content = catalog.analysis(capture_id)
    try:
        analysis = json.loads(content)
        text = str(analysis["text"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TorchperfdError(
            f"the analysis of capture {capture_id} is damaged", f"`torchperfd analyze {capture_id}` makes one"
        ) from error
    emit(analysis if as_json else plain(text.rstrip("\n")))


@captures_command.command("rm")
@click.argument("capture_ids", nargs=-1, callback=capture_argument, shell_complete=complete_captures)
@click.option("--older-than", type=AGE, help="All that were asked for longer ago, like 7d.")
@click.option("--dry-run", is_flag=True, help="Only print which would be deleted.")
@click.pass_obj
def remove_captures(
    catalog: AnyCatalog, capture_ids: tuple[str, ...], older_than: float | None, dry_run: bool
) -> None:
    """Delete captures and their traces; all that are named, or none. Pinned ones stay."""
    if bool(capture_ids) == (older_than is not None):
        raise click.UsageError("Name captures, or an age with --older-than.")
    if older_than is not None:
        old = catalog.list(Query(before=time.time() - older_than)).captures
        chosen = [each.record.capture_id for each in old if not each.pinned and each.record.state.ended]
        if len(chosen) < len(old):
            note(f"kept {len(old) - len(chosen)} that are pinned or in progress")
    else:
        chosen = list(dict.fromkeys(capture_ids))
    for capture_id in chosen:
        catalog.check_removable(capture_id)
    if dry_run:
        emit(plain(*chosen))
        return
    for capture_id in chosen:
        catalog.remove(capture_id)
        note(f"deleted {capture_id}")


@captures_command.command("upload")
@captures_argument
@click.option("--to", "url", help="URL to upload to; where the daemon does by default.")
@click.pass_obj
def upload_captures(catalog: AnyCatalog, capture_ids: tuple[str, ...], url: str | None) -> None:
    """Upload captures now, with the credentials of this shell, and print where they are."""
    if isinstance(catalog, DaemonCatalog):
        raise TorchperfdError(
            f"the captures in {catalog.directory} are the service's; it uploads them if configured",
            "copy one with `torchperfd captures get ID`",
        )
    url = url or read_upload_marker(catalog.directory)
    if not url:
        raise TorchperfdError(
            f"no daemon uploads the captures in {catalog.directory}", "give a URL with --to"
        )
    destination = Destination(url)
    destination.check_apart(catalog.directory)
    asyncio.run(_upload(catalog, destination, capture_ids))


@captures_command.command("cancel")
@click.argument("capture_id", callback=capture_argument, shell_complete=complete_captures)
@socket_option
def cancel_capture(capture_id: str, socket: str | None) -> None:
    """Cancel a capture that is queued or in progress, through the daemon that conducts it."""
    with connect(socket) as daemon:
        daemon.CancelCapture(control_pb2.CancelCaptureRequest(capture_id=capture_id), timeout=_CANCEL_S)
    note(f"capture {capture_id} is being cancelled; its manifest has the outcome")


@captures_command.command("pin")
@captures_argument
@click.pass_obj
def pin_captures(catalog: AnyCatalog, capture_ids: tuple[str, ...]) -> None:
    """Protect captures from removal, by the daemon's quota and by `rm`."""
    for capture_id in capture_ids:
        catalog.pin(capture_id)


@captures_command.command("unpin")
@captures_argument
@click.pass_obj
def unpin_captures(catalog: AnyCatalog, capture_ids: tuple[str, ...]) -> None:
    """Remove captures' protection."""
    for capture_id in capture_ids:
        catalog.pin(capture_id, pinned=False)


def _copy(catalog: Catalog, capture_id: str, target: Path) -> None:
    catalog.get(capture_id)
    try:
        target.mkdir(parents=True)
        for name, file in catalog.files(capture_id):
            with (target / name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
    except FileExistsError:
        raise TorchperfdError(f"{target} exists", "choose another directory with --output") from None
    except OSError as error:
        raise TorchperfdError(f"cannot copy to {target}: {error}") from error


async def _upload(catalog: Catalog, destination: Destination, capture_ids: tuple[str, ...]) -> None:
    for capture_id in dict.fromkeys(capture_ids):
        receipt = (await upload(catalog, destination, capture_id)).receipt
        catalog.note_upload(capture_id, receipt)
        if receipt.upload is Upload.REFUSED:
            raise TorchperfdError(f"capture {capture_id} is not uploaded: {receipt.reason}")
        emit(plain(receipt.url))


def _download(catalog: DaemonCatalog, capture_id: str, target: Path) -> None:
    try:
        catalog.fetch(capture_id, target)
    except (DaemonUnreachableError, DeadlineError) as error:
        if not target.is_dir():
            raise
        raise type(error)(
            f"the download was interrupted: {error.problem}", "the same command resumes it"
        ) from error


def captures_table(captures: Sequence[Listed], *, uploads: bool) -> FirstThatFits:
    """Return captures, one a row; on a terminal that has no room for them, times have no seconds.

    Args:
        uploads: Whether there is a column with the state of each upload.
    """
    heads = ["CAPTURE", "RUN", "STATE", "STEPS", "RANKS", "SIZE", *(["UPLOADED"] if uploads else []), "WHEN"]
    left = ("CAPTURE", "RUN", "STATE", "UPLOADED", "WHEN")

    def tables() -> Iterator[Table]:
        yield Table(heads, [_cells(each, uploads=uploads) for each in captures], left)
        rows = [_cells(each, uploads=uploads, short=True) for each in captures]
        yield Table(heads, rows, left, lift=("RUN", "CAPTURE"))

    return FirstThatFits(tables)


def _cells(listed: Listed, *, uploads: bool, short: bool = False) -> list[str]:
    record: CaptureRecord = listed.record
    steps = record.step_range
    form = "%Y-%m-%d %H:%M" if short else "%Y-%m-%d %H:%M:%S"
    when = time.strftime(form, time.localtime(record.requested_at))
    megabytes = sum(rank.bytes for rank in record.ranks) / 1e6
    return [
        record.capture_id,
        record.run,
        record.state.value,
        f"{steps[0]}-{steps[1] - 1}" if steps else "-",
        str(len(record.ranks)),
        f"{megabytes:.0f} MB" if short and megabytes >= 100 else f"{megabytes:.1f} MB",
        *([uploaded(listed, uploads=True)] if uploads else []),
        f"{when}  pinned" if listed.pinned else when,
    ]
