"""Diagnosis: derives the verdict on a run from its ranks' measurements. Pure, without I/O or clock."""

from torchperfd_daemon.diagnosis.evidence import RankEvidence
from torchperfd_daemon.diagnosis.verdict import Cause, RunFindings, Verdict
from torchperfd_daemon.diagnosis.verdicts import diagnose, rank_causes

__all__ = ["Cause", "RankEvidence", "RunFindings", "Verdict", "diagnose", "rank_causes"]
