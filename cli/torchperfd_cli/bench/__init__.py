"""``torchperfd bench``: measures a DataLoader under other settings, and implementations side by side.

Only :mod:`~torchperfd_cli.bench.loader_timing` and what runs in the process that measures import torch.
"""
