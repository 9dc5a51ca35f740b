"""The uploads of a daemon's captures, as its settings ask for them."""

from torchperfd_daemon.captures import Catalog, Destination, Uploader
from torchperfd_daemon.captures.destination import remove_upload_marker, write_upload_marker
from torchperfd_daemon.config.settings import ServeSettings


def uploader_of(settings: ServeSettings, catalog: Catalog) -> Uploader | None:
    """Return the uploader of captures, if configured.

    Raises:
        UsageError: The destination is the captures' own directory, or within it.
    """
    if settings.captures_upload is None:
        return None
    destination = Destination(settings.captures_upload)
    destination.check_apart(settings.captures_dir)
    return Uploader(catalog, destination)


def mark_uploads(settings: ServeSettings, uploader: Uploader | None) -> None:
    """Write the upload marker beside the captures, for commands that do not connect to a daemon."""
    if uploader is not None:
        write_upload_marker(settings.captures_dir, uploader.url)
    elif not settings.embedded:
        # A run's own daemon leaves the marker of the user's other daemons alone.
        remove_upload_marker(settings.captures_dir)
