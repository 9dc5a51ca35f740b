"""Goodput: what every rank-second of a run went to, across restarts."""
