"""The API server of Kubernetes as a pod reaches it, for the one call of the daemon: creating Events."""

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from torchperfd.model.formatting import one_line
from torchperfd_daemon.errors import TorchperfdError, UsageError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_TIMEOUT_S: Final = 10.0
_MAX_TOKEN_BYTES: Final = 64 * 1024
_MAX_ANSWER_BYTES: Final = 64 * 1024
_MAX_PROBLEM: Final = 200


class ClusterError(TorchperfdError):
    """The API server did not take an Event this time."""


class Created(Enum):
    """What became of an Event."""

    NEW = "created"
    BEFORE = "exists"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API server, with the credentials of this pod's service account.

    Attributes:
        folder: Holds ``token``, which the kubelet renews, and ``ca.crt``.
    """

    host: str
    port: int
    folder: Path

    def create_event(self, namespace: str, event: Mapping[str, Any]) -> Created:
        """Create an Event; one of the same name may exist already.

        Raises:
            ClusterError: The server does not answer or refuses it; the message has no secret.
        """
        path = f"/api/v1/namespaces/{namespace}/events"
        status, reason = self._post(path, json.dumps(event).encode())
        if status == http.client.CREATED:
            return Created.NEW
        if status == http.client.CONFLICT:
            return Created.BEFORE
        remedy = "its service account needs the right to create events" if status in (401, 403) else ""
        raise ClusterError(f"the API server answers HTTP {status} {one_line(reason, _MAX_PROBLEM)}", remedy)

    def _post(self, path: str, body: bytes) -> tuple[int, str]:
        connection: http.client.HTTPSConnection | None = None
        try:
            with (self.folder / "token").open(encoding="ascii") as file:
                token = file.read(_MAX_TOKEN_BYTES).strip()
            if not token or not token.isprintable():
                raise ClusterError(f"{self.folder / 'token'} has no token")
            context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
            connection = http.client.HTTPSConnection(
                self.host, self.port, timeout=_TIMEOUT_S, context=context
            )
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = str(error) or type(error).__name__
            raise ClusterError(
                f"the API server cannot be asked: {one_line(problem, _MAX_PROBLEM)}"
            ) from error
        finally:
            if connection is not None:
                connection.close()
        return response.status, response.reason


def find_cluster(environ: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Cluster:
    """Return the cluster that this process runs in.

    Raises:
        UsageError: It runs in none, or its pod has no token.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            "--kubernetes-events: this is no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set)",
            "leave it out, or run the daemon in a pod",
        )
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise UsageError(
                f"--kubernetes-events: there is no {folder / name}",
                "give the pod a service account with automountServiceAccountToken: true",
            )
    return Cluster(host, int(port), folder)
