"""The report: one account as the phase table, for people, and as a versioned document. Pure.

``numbers`` computes every figure once; the renderers (``text``, ``markdown``, ``html``,
``csv``) only lay out what it found, so they cannot disagree.
"""

from torchperfd.report.document import RUN_SCHEMA, run_document
from torchperfd.report.rank import RankReport

__all__ = ["RUN_SCHEMA", "RankReport", "run_document"]
