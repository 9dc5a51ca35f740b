"""The account of a step, as all of torchperfd has it; ``torchperfd.step_account`` defines it once."""

from torchperfd.step_account import Account, Part, PartKind

__all__ = ["Account", "Part", "PartKind"]
