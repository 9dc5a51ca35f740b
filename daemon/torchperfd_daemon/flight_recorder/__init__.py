"""Reads the Flight Recorder dumps of a dead job, and names the rank that the others waited for.

torch writes one for each rank after a timeout: its newest collectives, and whether each has ended. Import its
modules: ``analyze`` needs only the one that recognises a dump.
"""
