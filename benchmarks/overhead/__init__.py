"""What a profiler adds to a training step of about a millisecond: torchperfd and its peers.

Each contestant has a process of its own that trains the same model on the same data and
switches its instrumentation on and off in place, so that a difference is never one between
two processes. The processes take turns, and after a third of the rounds make way for fresh ones.
"""
