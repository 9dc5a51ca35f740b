"""The state, totals and newest steps of every rank on this node, in fixed memory per rank.

Totals come from the clients' cumulative totals, so a lost batch loses no time; batches feed the recent
history and the step-time histogram.
"""
