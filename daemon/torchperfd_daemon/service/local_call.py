"""Calls of the control service from within this process, for the HTTP interface."""

import os
from typing import NoReturn

import grpc

from torchperfd_daemon.rpc.callers import UNKNOWN, Caller, own_uid
from torchperfd_daemon.service.permissions import Rights


class CallRefusedError(Exception):
    """The service refused a call.

    Args:
        status: As a gRPC client would receive it.
        details: What happened, then what to do.
    """

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class LocalCall:
    """Takes the place of gRPC's context of a call.

    Args:
        rights: What the caller may do.
    """

    def __init__(self, rights: Rights) -> None:
        self.rights = rights

    async def abort(self, status: grpc.StatusCode, details: str) -> NoReturn:
        """End the call.

        Raises:
            CallRefusedError: Always.
        """
        raise CallRefusedError(status, details)


def owner_rights() -> Rights:
    """Return the rights of the daemon's own user."""
    return Rights(Caller(uid=own_uid(), pid=os.getpid()), is_admin=True)


def stranger_rights() -> Rights:
    """Return the rights of a user of the node that is not known."""
    return Rights(UNKNOWN, is_admin=False)
