"""``torchperfd bench``: measures a DataLoader under other settings, and implementations side by side.

Only :mod:`~torchperfd.bench.loader_timing` and what runs in the process that measures import torch.
"""
