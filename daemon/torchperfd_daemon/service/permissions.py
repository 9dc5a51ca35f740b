"""Permissions: which caller may do what with which run; requests are logged.

Every user with access to the socket sees all runs and the times of their steps, as `nvidia-smi` shows the
users of a GPU. Only its own user may see or change more of a process: captures, stacks, downloads, the
script's path, source lines in a verdict.
"""

import grp
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis import Cause
from torchperfd_daemon.errors import NotAllowedError, UsageError
from torchperfd_daemon.rpc.callers import Caller, CallerDirectory, own_uid
from torchperfd_daemon.service.audit import AuditLine
from torchperfd_daemon.store import Rank

_ROOT: Final = 0
_LINE: Final = re.compile(r", most of it in \S+ at [^;·]*?:\d+")
"""The line of a script in the evidence of waits for the device."""
_HIDDEN: Final = "its stacks are shown to its own user only"


class Permissions:
    """Decides what each caller may do.

    Args:
        admin_group: Id of the group whose members may do everything; None for none.
    """

    def __init__(self, callers: CallerDirectory, admin_group: int | None = None) -> None:
        self._callers = callers
        self._admin_group = admin_group

    def of(self, context: Any) -> "Rights":
        """Return what the caller of a method may do."""
        if (rights := getattr(context, "rights", None)) is not None:
            # A call from within this process, which has no connection.
            assert isinstance(rights, Rights)
            return rights
        caller = self._callers.find(context)
        is_admin = caller.uid in (_ROOT, own_uid()) or self._admin_group in caller.groups
        return Rights(caller, is_admin=is_admin)


class Rights:
    """What one caller may do.

    Args:
        is_admin: May do everything: root, the daemon's own user, and members of the configured group.
    """

    def __init__(self, caller: Caller, *, is_admin: bool) -> None:
        self.caller = caller
        self.is_admin = is_admin

    def may_command(self, uid: int | None) -> bool:
        """Return whether it may command the processes of a user; None is a user that is not known."""
        return self.is_admin or (uid is not None and uid == self.caller.uid)

    def check(self, subject: str, uids: Iterable[int | None]) -> None:
        """Make sure that it may command the processes of users.

        Args:
            subject: What they are, for the message.
            uids: Their users; without any, only administrators may.

        Raises:
            NotAllowedError: It may not.
        """
        if self.may_command_all(uids):
            return
        raise NotAllowedError(
            f"{subject} belongs to another user", "ask that user, root or a member of the admin_group"
        )

    def may_command_all(self, uids: Iterable[int | None]) -> bool:
        """Return whether it may command the processes of all these users; of none, only an administrator."""
        owners = set(uids)
        return self.is_admin or (bool(owners) and all(map(self.may_command, owners)))

    def own_name(self, name: str, runs: Mapping[str, Sequence[Rank]]) -> str:
        """Return the name on this node of the run that the caller's processes call ``name``.

        The two differ where another user's run had the name first.

        Args:
            runs: Those of this node, by their names here.
        """
        mine = (run for run, ranks in runs.items() if self.may_command(ranks[0].process.uid))
        if name in runs and self.may_command(runs[name][0].process.uid):
            return name
        return next((run for run in mine if runs[run][0].process.run == name), name)

    def request(self, action: str, subject: str) -> AuditLine:
        """Return the line of a request for the audit log; it is written once the request is decided."""
        return AuditLine(action, subject, self.caller)

    def redact_status(self, status: control_pb2.RankStatus) -> None:
        """Remove from a rank's status the fields that only its own user may see."""
        if not self.may_command(status.uid if status.HasField("uid") else None):
            _hide_script(status.identity)

    def redact_account(self, account: control_pb2.RankAccount, uid: int | None) -> None:
        """Remove from a rank's totals the fields that only its own user may see."""
        if self.may_command(uid):
            return
        _hide_script(account.identity)
        account.failure = ""
        for wait in account.account.sync_waits:
            wait.ClearField("file")
            wait.ClearField("line")

    def redact_verdict(self, verdict: control_pb2.Verdict, uids: Iterable[int | None]) -> None:
        """Remove what only the users of a run may see from the verdict on it, and from further causes."""
        if self.may_command_all(uids):
            return
        verdict.ClearField("script")
        verdict.ClearField("failure")
        verdict.note = _LINE.sub("", verdict.note)
        for each in (verdict, *verdict.others):
            each.ClearField("line")
            if each.cause == Cause.HANG.value:
                each.summary = each.summary.replace(each.evidence, _HIDDEN)
                each.evidence = _HIDDEN
            else:
                each.summary = _LINE.sub("", each.summary)
                each.evidence = _LINE.sub("", each.evidence)


def _hide_script(identity: session_pb2.RankIdentity) -> None:
    identity.script = identity.command = ""


def group_id(name: str | None) -> int | None:
    """Return the id of a group, by its name or its id; None for None.

    Raises:
        UsageError: There is no such group.
    """
    if name is None:
        return None
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(
            f"admin_group: there is no group {name!r}", "create it, or name another one"
        ) from None
