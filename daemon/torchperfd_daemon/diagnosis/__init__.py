"""Diagnosis: derives the verdict on a run from its ranks' measurements. Pure, without I/O or clock."""
