"""The fleet: connections between the daemons of all nodes, so that each can answer for the whole job."""

from torchperfd_daemon.fleet.credentials import Address as Address
from torchperfd_daemon.fleet.credentials import CredentialFiles as CredentialFiles
from torchperfd_daemon.fleet.credentials import Credentials as Credentials
from torchperfd_daemon.fleet.credentials import check_listening as check_listening
from torchperfd_daemon.fleet.credentials import parse_address as parse_address
from torchperfd_daemon.fleet.credentials import read_credentials as read_credentials
from torchperfd_daemon.fleet.peers import JobPeers as JobPeers
from torchperfd_daemon.fleet.peers import PeerAddresses as PeerAddresses
from torchperfd_daemon.fleet.peers import Peers as Peers
from torchperfd_daemon.fleet.peers import check_trust as check_trust
from torchperfd_daemon.fleet.peers import parse_peers as parse_peers
from torchperfd_daemon.fleet.service import FleetService as FleetService
from torchperfd_daemon.fleet.transport import AuthInterceptor as AuthInterceptor
from torchperfd_daemon.fleet.transport import FanOut as FanOut
from torchperfd_daemon.fleet.transport import listen as listen
from torchperfd_daemon.fleet.view import FleetView as FleetView
