"""Detectors: each reads a stream of one kind of measurement and detects one kind of problem.

They are pure and of fixed size: no clock, no I/O, and the same work at every step.
"""
