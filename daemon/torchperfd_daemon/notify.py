"""systemd's readiness protocol: one datagram to the socket that the environment names."""

import os
import socket


def notify(state: str) -> bool:
    """Send a state such as ``READY=1``; return whether a service manager was there to hear it.

    See sd_notify(3): a leading ``@`` names an abstract socket.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return False
    return True
