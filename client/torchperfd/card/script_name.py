"""The name of the training script in the fixes of a verdict."""

import re
from typing import Any, Final

UNNAMED: Final = "SCRIPT"
_COMMAND: Final = re.compile(r"(^|; or )(`torchperfd tune (?:--only threads )?).+(` (?:tries|measures))\b")


def name_script(verdict: Any, words: str) -> None:
    """Put a script into the command of a verdict's fix, and of the fixes of its further causes.

    Args:
        verdict: A ``torchperfd.v1`` message ``Verdict``; changed in place.
        words: The script as it is given to the command, quoted for a shell; :data:`UNNAMED` to take it out.
    """
    for each in (verdict, *verdict.others):
        each.fix = _COMMAND.sub(lambda found: f"{found[1]}{found[2]}{words}{found[3]}", each.fix)
