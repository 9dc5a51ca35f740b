"""Check a release from within the cluster: the daemon of this node, and all daemons behind the Service.

SERVICE_URL is the headless Service's; FLEET is not empty where the daemons know each other. Exits 1 with a
line for each fault.
"""

import os
import socket
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request

DEADLINE_S = 10


def commands() -> list[str]:
    """Ask this node's daemon as a training pod would, then all nodes through it; return the faults."""
    faults = []
    for options in [[], ["--fleet"]] if os.environ.get("FLEET") else [[]]:
        command = ["torchperfd", "ps", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False)
        print(f"$ {' '.join(command)}\n{done.stdout}", end="")
        if done.returncode:
            faults.append(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return faults


def addresses(url: urllib.parse.SplitResult) -> list[str]:
    """Return the addresses of all daemons."""
    found = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


def readiness(url: urllib.parse.SplitResult, address: str) -> str:
    """Ask one daemon whether it is ready; return the fault, empty for none."""
    # The certificate is made out to whatever the site has chosen, and no secret is sent.
    unverified = ssl._create_unverified_context()
    host = f"[{address}]" if ":" in address else address
    try:
        urllib.request.urlopen(
            f"{url.scheme}://{host}:{url.port}/-/ready", timeout=DEADLINE_S, context=unverified
        ).close()
    except OSError as error:
        return f"{address} is not ready: {error}"
    print(f"{address} is ready")
    return ""


def main() -> int:
    """Run all checks."""
    url = urllib.parse.urlsplit(os.environ["SERVICE_URL"])
    try:
        daemons = addresses(url)
    except OSError as error:
        faults = [f"{url.hostname} has no address: {error}"]
    else:
        faults = [fault for address in daemons if (fault := readiness(url, address))]
    faults += commands()
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
