"""Diagnosis: from what ranks measured to a verdict. Pure: data in, dataclass out."""

from torchperfd_daemon.diagnosis.causes import rank_causes
from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.findings import RunFindings
from torchperfd_daemon.diagnosis.verdict import Cause, RankProfile, Verdict, diagnose

__all__ = ["Cause", "RankEvidence", "RankProfile", "RunFindings", "Verdict", "diagnose", "rank_causes"]
