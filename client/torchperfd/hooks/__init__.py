"""The hooks: where torchperfd touches torch. Each module hooks one thing and can undo it.

A hook calls the loop and nothing else. It costs well under a microsecond, lets
no exception of ours out, and does nothing on other threads or in forked
children.
"""

from torchperfd.hooks.installation import Hooks

__all__ = ["Hooks"]
