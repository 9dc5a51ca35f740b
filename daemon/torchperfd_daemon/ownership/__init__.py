"""Ownership: which job a rank belongs to, and to which job each GPU was given."""

from torchperfd_daemon.ownership.collector import OwnershipCollector
from torchperfd_daemon.ownership.owner import Owner, Owners, from_identity

__all__ = ["Owner", "Owners", "OwnershipCollector", "from_identity"]
