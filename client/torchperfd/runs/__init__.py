"""Whole runs: their reports are kept, read again, and compared."""
