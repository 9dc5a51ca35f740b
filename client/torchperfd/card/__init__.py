"""The verdict card: one description of what is wrong with a run, rendered alike wherever it is shown.

``contents`` has the data, ``text`` and ``html`` lay it out. Pure, and without protobuf: the card is built
from a verdict's message by its fields.
"""

from torchperfd.card.contents import CauseCard, VerdictCard, card_of, command_after_run, unknown_card

__all__ = ["CauseCard", "VerdictCard", "card_of", "command_after_run", "unknown_card"]
