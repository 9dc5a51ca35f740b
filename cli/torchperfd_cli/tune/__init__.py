"""``torchperfd tune``: runs a script briefly with one change after another, and keeps those that are faster.

Only :mod:`~torchperfd_cli.tune.torch_patches` and what runs in the trial process import torch.
"""
