"""Whether ``torchperfd bench compare`` agrees with ``torch.utils.benchmark`` used by hand."""
