"""The report: one set of totals as the phase table, for people, and as a versioned document. Pure.

``numbers`` computes every figure once; the renderers (``text``, ``markdown``, ``html``,
``csv``) only lay out what it found, so they cannot disagree.
"""

from torchperfd.report.rank import RankReport
from torchperfd.report.run import RUN_SCHEMA, run_document

__all__ = ["RUN_SCHEMA", "RankReport", "run_document"]
