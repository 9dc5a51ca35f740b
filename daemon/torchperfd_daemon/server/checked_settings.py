"""The settings of ``torchperfd serve`` with all that they name, read and validated.

The daemon starts with them; ``torchperfd config check`` asks for them alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchperfd_daemon.captures.destination import Destination, check_destination
from torchperfd_daemon.config.options import ServeSettings
from torchperfd_daemon.errors import UsageError
from torchperfd_daemon.fleet.addresses import Address
from torchperfd_daemon.fleet.credentials import CredentialFiles, check_listening
from torchperfd_daemon.fleet.peers import JobPeers, PeerAddresses, Peers, check_trust, parse_peers
from torchperfd_daemon.fleet.series_reader import SeriesReader
from torchperfd_daemon.fleet.series_store import SeriesStore, StoreSettings
from torchperfd_daemon.fleet.series_view import SeriesView
from torchperfd_daemon.lake.tables import check_cluster
from torchperfd_daemon.push.cluster import Cluster, find_cluster
from torchperfd_daemon.push.otlp_endpoint import OtlpEndpoint, read_endpoint
from torchperfd_daemon.server.lifecycle import check_socket_path
from torchperfd_daemon.service.permissions import group_id
from torchperfd_daemon.web.config_file import WebConfigFile


@dataclass(frozen=True, slots=True)
class CheckedSettings:
    """Valid settings, and what was read because they name it. Nothing is listened on, written or changed.

    Attributes:
        settings: With an absolute captures directory.
        credentials: The fleet's; without any where none are configured.
        fleet_address: Where to listen for daemons of other nodes; None for nowhere.
        peers: The fleet's other daemons; their source is read when their addresses are needed.
        admin_group: The id of the group whose members may command all runs.
        web_config: TLS and basic auth of the metrics page.
        destination: Where captures are uploaded to.
        otlp: Where metrics are sent to.
        series: The store that answers questions about all nodes; None without one.
        cluster: Where Events on pods are written.
    """

    settings: ServeSettings
    credentials: CredentialFiles
    fleet_address: Address | None
    peers: PeerAddresses | None
    admin_group: int | None
    web_config: WebConfigFile | None
    destination: Destination | None
    otlp: OtlpEndpoint | None
    series: SeriesView | None
    cluster: Cluster | None

    @property
    def job_peers(self) -> JobPeers | None:
        """The peers, if training processes name them."""
        return self.peers if isinstance(self.peers, JobPeers) else None

    async def read_peers(self) -> Sequence[Address]:
        """Return the addresses of the fleet's daemons, as far as the configuration names them.

        Raises:
            TorchperfdError: Their source cannot be read.
        """
        return () if self.peers is None else await self.peers.addresses(lambda _: True)


def check_settings(settings: ServeSettings) -> CheckedSettings:
    """Read what the settings name, and validate both.

    Raises:
        TorchperfdError: A daemon would not start with them; the message states what to do.
    """
    # Clients write there, and may have another working directory.
    settings = replace(settings, captures_dir=settings.captures_dir.absolute())
    check_socket_path(settings.socket)
    if settings.user_label and "owners" not in settings.collectors:
        raise UsageError(
            "--user-label needs the collector owners, which looks up the users",
            "add owners to --collectors, or leave --user-label out",
        )
    if settings.kubernetes_events and not {"gpu", "owners"} <= set(settings.collectors):
        raise UsageError(
            "--kubernetes-events needs the collectors gpu and owners, which find the pod of a rank",
            "add them to --collectors, or leave --kubernetes-events out",
        )
    destination = None
    if settings.captures_upload is not None:
        destination = Destination(settings.captures_upload)
        destination.check_apart(settings.captures_dir)
    if settings.lake is not None:
        check_destination(settings.lake)
        check_cluster(settings.lake_cluster)
    credentials = CredentialFiles(settings)
    fleet_address = Address(*settings.fleet_address) if settings.fleet_address else None
    if fleet_address is not None:
        check_listening(fleet_address, credentials.current())
    named = parse_peers(settings.fleet_peers, own=fleet_address) if settings.fleet_peers else None
    if isinstance(named, JobPeers):
        check_trust(credentials.current())
    series = None
    if settings.prometheus is not None:
        store = StoreSettings(
            settings.prometheus,
            settings.prometheus_secret_file,
            settings.prometheus_ca_file,
            settings.prometheus_tenant,
        )
        series = SeriesView(SeriesReader(SeriesStore(store)))
    return CheckedSettings(
        settings,
        credentials,
        fleet_address,
        named if named is None or isinstance(named, JobPeers) else Peers(named),
        group_id(settings.admin_group),
        WebConfigFile(settings.web_config_file) if settings.web_config_file else None,
        destination,
        read_endpoint(settings.otlp) if settings.otlp else None,
        series,
        find_cluster() if settings.kubernetes_events else None,
    )
