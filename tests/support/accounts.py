"""Accounts of a step as diagnosis makes them, for tests of what shows them."""

from torchperfd.model.messages import fill
from torchperfd.model.step_account import Account, Part, PartKind
from torchperfd.v1 import control_pb2


def uneven_account() -> Account:
    """Return the account of ranks that wait for each other because their work is uneven."""
    parts = (
        Part(PartKind.UNEVEN_WORK, "", 0.0415),
        Part(PartKind.COMPUTING, "forward", 0.0201),
        Part(PartKind.COMPUTING, "backward", 0.0119),
        Part(PartKind.EXCHANGE, "", 0.0082),
        Part(PartKind.COMPUTING, "optimizer", 0.0021),
        Part(PartKind.LOSS, "garbage collection", 0.0012),
        Part(PartKind.LATE_RANK, "", 0.0004, 3),
        Part(PartKind.UNNAMED, "other", 0.0002),
    )
    return Account(0.0856, 0.0861, parts, (Part(PartKind.DATA, "", 0.0031),))


def with_account(verdict: control_pb2.Verdict, account: Account) -> control_pb2.Verdict:
    """Return a copy of a verdict with an account."""
    message = control_pb2.Verdict.FromString(verdict.SerializeToString())
    fill(message.account, account)
    return message
