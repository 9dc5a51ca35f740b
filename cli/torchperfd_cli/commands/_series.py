"""The options by which commands read series in place of asking daemons."""

import contextlib
import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from torchperfd_daemon.errors import ConfigError, TorchperfdError, UsageError

if TYPE_CHECKING:
    from torchperfd_daemon.fleet.series_reader import SeriesReader
    from torchperfd_daemon.fleet.series_view import SeriesView

_Function = TypeVar("_Function", bound=Callable[..., Any])
_URL: Final = "prometheus"
_SECRET: Final = "prometheus_secret_file"
_CA: Final = "prometheus_ca_file"
_TENANT: Final = "prometheus_tenant"
_OBJECTS: Final = 100_000
"""New objects until garbage is looked for."""


@dataclass(frozen=True, slots=True)
class SeriesOptions:
    """The options of the command line that name a store of series; None for those that are not given."""

    url: str | None = None
    secret_file: Path | None = None
    ca_file: Path | None = None
    tenant: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether the command line names a store."""
        return self.url is not None

    def view(self, *, begin: bool = False) -> "SeriesView | None":
        """Return a view of the store that is given or configured; None without one.

        Args:
            begin: Whether all ranks will be asked for, so that they are read while modules are imported.

        Raises:
            UsageError: Its URL cannot be used.
            TorchperfdError: Its files of credentials cannot be used.
        """
        from torchperfd_daemon.config.effective import find_files, resolve

        given = {_URL: self.url, _SECRET: self.secret_file, _CA: self.ca_file, _TENANT: self.tenant}
        flags = {key: value for key, value in given.items() if value is not None}
        chosen = os.environ.get("TORCHPERFD_CONFIG")
        files = find_files(Path(chosen)) if chosen else []
        if not chosen:
            # The service's file may be for its own user only.
            with contextlib.suppress(ConfigError):
                files = find_files(None)
        settings = resolve(flags, files).settings
        url, *others = (settings[key].value for key in given)
        if not url:
            return None
        try:
            reader = _reader(url, *others)
        except UsageError:
            raise
        except TorchperfdError:
            if self.is_given:
                raise
            # The service's secret may be for its own user only; its daemon then answers from series.
            return None
        if begin:
            reader.begin()
        # Imports numpy.
        from torchperfd_daemon.fleet.series_view import SeriesView

        return SeriesView(reader)

    def required_view(self) -> "SeriesView":
        """Return the same where there has to be one.

        Raises:
            UsageError: No store is given or configured, or as :meth:`view`.
        """
        view = self.view()
        if view is None:
            raise UsageError(
                "no store of series is configured", "give --prometheus or set TORCHPERFD_PROMETHEUS"
            )
        return view


NO_SERIES: Final = SeriesOptions()
"""For commands without these options."""


@functools.lru_cache(maxsize=1)
def _reader(url: str, secret_file: Path | None, ca_file: Path | None, tenant: str | None) -> "SeriesReader":
    """Return the one reader of this process: ``--watch`` and ``top`` ask more often than series change."""
    from torchperfd_daemon.fleet.series_reader import SeriesReader
    from torchperfd_daemon.fleet.series_store import SeriesStore, StoreSettings

    return SeriesReader(SeriesStore(StoreSettings(url, secret_file, ca_file, tenant)))


_FILE: Final = click.Path(path_type=Path)


def series_options(command: _Function) -> _Function:
    """Add ``--prometheus`` and its credentials; the command gets them as ``series``."""

    @click.option(
        "--prometheus",
        metavar="URL",
        help="Ask a Prometheus, Thanos, Mimir or VictoriaMetrics about all nodes, not the daemon.",
    )
    @click.option(
        "--prometheus-secret-file",
        type=_FILE,
        metavar="PATH",
        help="A bearer token for it, or the password of the user in its URL.",
    )
    @click.option(
        "--prometheus-ca-file", type=_FILE, metavar="PATH", help="Certificate authority of its certificate."
    )
    @click.option("--prometheus-tenant", metavar="NAME", help="Its tenant, sent as X-Scope-OrgID.")
    @functools.wraps(command)
    def run(
        *args: Any,
        prometheus: str | None,
        prometheus_secret_file: Path | None,
        prometheus_ca_file: Path | None,
        prometheus_tenant: str | None,
        **options: Any,
    ) -> Any:
        series = SeriesOptions(prometheus, prometheus_secret_file, prometheus_ca_file, prometheus_tenant)
        usual = gc.get_threshold()
        # Series of thousands of ranks are many objects, none of them garbage.
        gc.set_threshold(_OBJECTS, *usual[1:])
        try:
            return command(*args, series=series, **options)
        finally:
            gc.set_threshold(*usual)

    return run  # type: ignore[return-value] # it takes other options
