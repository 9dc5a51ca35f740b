"""The fleet: connections between the daemons of all nodes, so that each can answer for the whole job."""

from torchperfd_daemon.fleet.address import Address, parse_address
from torchperfd_daemon.fleet.credential_files import CredentialFiles
from torchperfd_daemon.fleet.credentials import Credentials, check_listening, read_credentials
from torchperfd_daemon.fleet.fanout import FanOut
from torchperfd_daemon.fleet.interceptor import AuthInterceptor
from torchperfd_daemon.fleet.job_peers import JobPeers, check_trust
from torchperfd_daemon.fleet.listener import listen
from torchperfd_daemon.fleet.peers import Peers, parse_peers
from torchperfd_daemon.fleet.service import FleetService
from torchperfd_daemon.fleet.view import FleetView

__all__ = [
    "Address",
    "AuthInterceptor",
    "CredentialFiles",
    "Credentials",
    "FanOut",
    "FleetService",
    "FleetView",
    "JobPeers",
    "Peers",
    "check_listening",
    "check_trust",
    "listen",
    "parse_address",
    "parse_peers",
    "read_credentials",
]
