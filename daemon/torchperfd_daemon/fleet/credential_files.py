"""The files of the fleet's credentials, which can be replaced while the daemon runs."""

import logging

from torchperfd_daemon.config.settings import ServeSettings
from torchperfd_daemon.errors import TorchperfdError, UsageError
from torchperfd_daemon.fleet.credentials import Credentials, read_credentials

log = logging.getLogger("torchperfd.server")


class CredentialFiles:
    """The credentials in force, and the files that they were read from.

    Raises:
        TorchperfdError: A file cannot be used; the message states what to do.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._current = self._read()

    def current(self) -> Credentials:
        """Return the credentials in force."""
        return self._current

    def reload(self) -> None:
        """Read the files again; if one is invalid, the previous credentials stay in force."""
        try:
            newest = self._read()
            if newest.kinds != self._current.kinds:
                raise UsageError(
                    "the fleet's token or TLS was added or removed", "restart the daemon to apply that"
                )
        except TorchperfdError as error:
            log.error("%s; the fleet's previous credentials stay in force", error)
        else:
            self._current = newest

    def _read(self) -> Credentials:
        settings = self._settings
        return read_credentials(
            settings.fleet_token_file, settings.fleet_tls_cert, settings.fleet_tls_key, settings.fleet_tls_ca
        )
