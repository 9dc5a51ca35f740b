"""The fleet's port: a gRPC server on TCP, for peers only."""

from typing import Final

import grpc

from torchperfd.v1 import fleet_pb2_grpc
from torchperfd_daemon.errors import TorchperfdError
from torchperfd_daemon.fleet.address import Address
from torchperfd_daemon.fleet.credentials import check_listening, server_credentials
from torchperfd_daemon.fleet.interceptor import AuthInterceptor

_MAX_RECEIVED_BYTES: Final = 256 * 1024
_MAX_CALLS: Final = 256
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES),
    ("grpc.max_concurrent_streams", _MAX_CALLS),
    # Else a second daemon binds the same port without an error, and each gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
)


async def listen(
    address: Address, interceptor: AuthInterceptor, service: fleet_pb2_grpc.FleetServicer
) -> tuple[grpc.aio.Server, Address]:
    """Serve the fleet; return the server and its address, with the port that was chosen for port 0.

    Args:
        interceptor: Decides which calls are admitted, and by which credentials connections are secured.

    Raises:
        UsageError: Other nodes can reach the address, and there are no credentials.
        TorchperfdError: The address cannot be bound.
    """
    check_listening(address, interceptor.current())
    server = grpc.aio.server(interceptors=[interceptor], options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    fleet_pb2_grpc.add_FleetServicer_to_server(service, server)
    secure = server_credentials(interceptor.current)
    try:
        port = (
            server.add_insecure_port(str(address))
            if secure is None
            else server.add_secure_port(str(address), secure)
        )
        await server.start()
    except RuntimeError as error:
        raise TorchperfdError(
            f"cannot listen for the fleet on {address}", "choose another address with --fleet-address"
        ) from error
    return server, Address(address.host, port)
