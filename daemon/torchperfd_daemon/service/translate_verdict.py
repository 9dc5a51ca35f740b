"""Conversion of a verdict to its message."""

from dataclasses import replace

from torchperfd.model.messages import pack
from torchperfd.v1 import control_pb2
from torchperfd_daemon.diagnosis.remedies import fix_of
from torchperfd_daemon.diagnosis.verdict import Verdict


def verdict_to_message(verdict: Verdict) -> control_pb2.Verdict:
    return pack(
        control_pb2.Verdict,
        verdict,
        rank=-1 if verdict.rank is None else verdict.rank,
        summary=verdict.summary,
        fix=fix_of(verdict),
        # The account and the note are of the run; the first cause has them.
        others=[verdict_to_message(replace(other, account=None, note="")) for other in verdict.others],
    )
