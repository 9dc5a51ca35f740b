"""The gRPC services: sessions of training processes, and control by people and programs."""

from torchperfd_daemon.service.control import ControlService
from torchperfd_daemon.service.session import Node, SessionService

__all__ = ["ControlService", "Node", "SessionService"]
