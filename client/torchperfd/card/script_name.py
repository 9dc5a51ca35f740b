"""The name of the training script in the fixes of a verdict."""

from typing import Final

SCRIPT: Final = "SCRIPT"
"""Stands in a fix for the script, whose name not every reader may see."""


def name_script(fix: str, script: str) -> str:
    """Return a fix with the name of the script; without a name, the fix itself.

    Args:
        script: As commands take it, quoted for a shell; empty if it is unknown.
    """
    return fix.replace(SCRIPT, script) if script else fix
