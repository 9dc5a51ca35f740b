"""Traffic of the node's network interfaces."""

from collections.abc import Sequence
from pathlib import Path

from torchperfd_daemon.collectors.base import Family
from torchperfd_daemon.collectors.procfs import read


class NetworkCollector:
    """Samples bytes received and transmitted, each byte once.

    Bridges, tunnels and bonds pass on what a real interface has counted, so only interfaces with
    a device count. Where there is none, as in a container, all but the loopback do.
    """

    name = "network"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._dev = proc / "net" / "dev"
        self._net = sys / "class" / "net"

    def sample(self) -> Sequence[Family]:
        """Return bytes by direction; none on a node without interfaces.

        Raises:
            OSError: procfs cannot be read.
            ValueError: It is damaged.
        """
        family = Family("node_network_bytes", "Bytes over the network interfaces.", "counter", ("direction",))
        interfaces = parse_interfaces(read(self._dev))
        interfaces.pop("lo", None)
        real = {name for name in interfaces if (self._net / name / "device").exists()}
        counted = [traffic for name, traffic in interfaces.items() if name in real or not real]
        if counted:
            family.add(sum(received for received, _ in counted), "receive")
            family.add(sum(transmitted for _, transmitted in counted), "transmit")
        return [family]


def parse_interfaces(text: str) -> dict[str, tuple[int, int]]:
    """Return (bytes received, bytes transmitted) by interface, from ``/proc/net/dev``.

    Raises:
        ValueError: It is damaged.
    """
    interfaces = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        fields = rest.split()
        if not name or len(fields) < 9:
            raise ValueError(f"{line!r} is no line of an interface")
        interfaces[name.strip()] = (int(fields[0]), int(fields[8]))
    return interfaces
