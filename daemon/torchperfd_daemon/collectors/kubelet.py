"""The kubelet's list of the devices that containers have."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from torchperfd_daemon.collectors.base import CollectorUnavailableError

POD_RESOURCES: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")

_KUBELET_DEADLINE_S: Final = 5.0
_GPU_RESOURCES: Final = "nvidia.com/"
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    # The kubelet's server refuses the path of a socket as the name of a host.
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)

# The part of the kubelet's API that is needed here. By message: field, number, and the message that
# it holds; empty for text. All but those of `_SINGULAR` are repeated.
_KUBELET_MESSAGES: Final = {
    "ContainerDevices": (("resource_name", 1, ""), ("device_ids", 2, "")),
    "ContainerResources": (("name", 1, ""), ("devices", 2, "ContainerDevices")),
    "PodResources": (("name", 1, ""), ("namespace", 2, ""), ("containers", 3, "ContainerResources")),
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources"),),
}
_SINGULAR_FIELDS: Final = frozenset({"name", "namespace", "resource_name"})


@dataclass(frozen=True, slots=True)
class Given:
    """A device that the kubelet has given to a container.

    Attributes:
        device: The GPU's UUID or index, as the device plugin calls it.
        container: ``namespace/pod/container``.
    """

    device: str
    container: str


class PodResources:
    """The kubelet's list of the devices of containers.

    Args:
        path: The kubelet's socket; on nodes without one there is nothing to list.
    """

    def __init__(self, path: Path = POD_RESOURCES) -> None:
        self._path = path

    def list(self) -> list[Given]:
        """Ask the kubelet for the GPUs that containers have now.

        Raises:
            CollectorUnavailableError: The kubelet does not answer, or its answer is malformed.
        """
        try:
            if not self._path.exists():
                return []
        except PermissionError:
            # A user's own daemon on a node of Kubernetes: the kubelet's directory is not for it.
            return []
        try:
            with grpc.insecure_channel(f"unix:{self._path}", options=_CHANNEL_OPTIONS) as channel:
                ask = channel.unary_unary(
                    "/v1.PodResourcesLister/List",
                    request_serializer=bytes,
                    response_deserializer=_kubelet_response().FromString,
                )
                return list(_given_devices(ask(b"", timeout=_KUBELET_DEADLINE_S)))
        except grpc.RpcError as error:
            raise CollectorUnavailableError(
                f"the kubelet does not answer on {self._path} ({_reason(error)}); let the daemon's user read"
                " and write that socket, or unmount its directory"
            ) from error


def _given_devices(response: Any) -> Iterator[Given]:
    for pod in response.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith(_GPU_RESOURCES):
                    for device in devices.device_ids:
                        # A GPU that containers share by time slicing has one id per container.
                        yield Given(device.partition("::")[0], f"{pod.namespace}/{pod.name}/{container.name}")


@cache
def _kubelet_response() -> Any:
    """Return the class of the kubelet's answer, from descriptors: for one call, that is all it takes."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="pod_resources.proto", package="v1", syntax="proto3")
    for message, fields in _KUBELET_MESSAGES.items():
        made = file.message_type.add(name=message)
        for name, number, holds in fields:
            made.field.add(
                name=name,
                number=number,
                type=field.TYPE_MESSAGE if holds else field.TYPE_STRING,
                type_name=f".v1.{holds}" if holds else None,
                label=field.LABEL_OPTIONAL if name in _SINGULAR_FIELDS else field.LABEL_REPEATED,
            )
    # A pool of its own: another library in this process may know the kubelet's messages as well.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))


def _reason(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else str(error)
