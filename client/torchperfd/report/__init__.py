"""The report: one set of totals as the phase table, for people, and as a versioned document. Pure.

``numbers`` computes every figure once; the renderers in ``phase_table`` only lay them out, so they cannot
disagree.
"""

from torchperfd.report.rank import RUN_SCHEMA, RankReport, run_document

__all__ = ["RUN_SCHEMA", "RankReport", "run_document"]
