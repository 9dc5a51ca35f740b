"""Permissions: which caller may do what with which run, and the audit log of what was decided.

Every user with access to the socket sees all runs and the times of their steps, as `nvidia-smi` shows the
users of a GPU. Only its own user may see or change more of a process: captures, stacks, downloads, the
script's path, source lines in a verdict. The HTTP interface calls the control service from within this
process, with rights of its own choice.
"""

import grp
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchperfd.model.formatting import one_line
from torchperfd.v1 import control_pb2, session_pb2
from torchperfd_daemon.diagnosis.verdict import public_evidence, without_lines
from torchperfd_daemon.errors import NotAllowedError, TorchperfdError, UsageError
from torchperfd_daemon.rpc.callers import Caller, CallerDirectory, own_uid
from torchperfd_daemon.store.store import Rank

log = logging.getLogger("torchperfd.audit")

_MAX_CHARACTERS: Final = 120
_MAX_LOGGED: Final = 20


class AuditLine:
    """The line of one request; only the first outcome is written, at the latest when its block ends.

    Args:
        action: What was requested, such as ``capture``.
        subject: What it is about, such as ``all ranks of run baseline``.
    """

    def __init__(self, action: str, subject: str, caller: Caller) -> None:
        self._request = f"{action} of {one_line(subject, _MAX_CHARACTERS)} by {caller}"
        self._is_written = False

    def __enter__(self) -> "AuditLine":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TorchperfdError):
            self.failed(error)
        why = (
            type(error).__name__ if isinstance(error, Exception) else "the caller left before it was decided"
        )
        self._write(logging.INFO, f"failed: {why}")

    def allowed(self, owners: Iterable[int | None] = (), capture_id: str = "") -> None:
        """Write that the request is allowed, and begins.

        Args:
            owners: The users of the processes or files that it acts on.
            capture_id: Of the capture that it makes, if any.
        """
        users = [
            "unknown" if uid is None else str(uid) for uid in sorted(set(owners), key=lambda uid: uid or -1)
        ]
        owned = f", owner {' and '.join(users)}" if users else ""
        capture = f", capture {one_line(capture_id, _MAX_CHARACTERS)}" if capture_id else ""
        self._write(logging.INFO, f"allowed{owned}{capture}")

    def failed(self, error: TorchperfdError) -> None:
        """Write why the request was refused, or could not be carried out."""
        refused = isinstance(error, NotAllowedError)
        level, outcome = (logging.WARNING, "refused") if refused else (logging.INFO, "failed")
        self._write(level, f"{outcome}: {one_line(error.problem, _MAX_CHARACTERS)}")

    def drop(self) -> None:
        """Write nothing."""
        self._is_written = True

    def _write(self, level: int, outcome: str) -> None:
        if not self._is_written:
            self._is_written = True
            log.log(level, "%s: %s", self._request, outcome)


def subject_of(request: control_pb2.CaptureRequest | control_pb2.StacksRequest) -> str:
    """Return what a request is about, for the log."""
    job = request.job if isinstance(request, control_pb2.CaptureRequest) else ""
    named = [f"{kind} {name}" for kind, name in (("run", request.run), ("job", job)) if name]
    ranks = f"ranks {', '.join(map(str, request.ranks[:_MAX_LOGGED]))}" if request.ranks else "all ranks"
    return " ".join((ranks, "of", *(named or ["the caller's only run"])))


_ROOT: Final = 0


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
        verdict.note = without_lines(verdict.note)
        for each in (verdict, *verdict.others):
            each.ClearField("line")
            shown = public_evidence(each.cause, each.evidence)
            each.summary = without_lines(each.summary.replace(each.evidence, shown))
            each.evidence = shown


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


@dataclass(frozen=True, slots=True)
class LocalCall:
    """Takes the place of gRPC's context in a call from within this process."""

    rights: Rights
