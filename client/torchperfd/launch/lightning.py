"""Lightning's own launcher under ``torchperfd run``: the ranks that it starts run under it, too.

Lightning starts the script once more for every further rank of the node, as plain Python. Here that command
becomes one of ``torchperfd run`` with the same run's name, so that all ranks are in one run and its report.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from torchperfd.own_commands import script_command

_LAUNCHERS: Final = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in ("lightning.fabric", "lightning_fabric")
)
_COMMAND: Final = "_basic_subprocess_cmd"


class LightningLauncher:
    """Waits for the module with Lightning's launcher, and puts the ranks that it starts into a run.

    Args:
        run: The run's name.
        job: What people call this kind of run.
    """

    def __init__(self, run: str, job: str) -> None:
        from torchperfd.hooks.torch_import import ModuleImport

        self._options = ("run", "--quiet", "--no-daemon", "--run", run, "--job", job)
        self._replaced: list[tuple[ModuleType, Callable[[], Sequence[str]]]] = []
        self._pending = [ModuleImport(name, functools.partial(self._follow, name)) for name in _LAUNCHERS]
        for pending in self._pending:
            pending.wait()

    def leave(self) -> None:
        """Wait no longer, and put the launcher back as it was."""
        for pending in self._pending:
            pending.cancel()
        for module, original in self._replaced:
            setattr(module, _COMMAND, original)

    def _follow(self, name: str) -> None:
        module = sys.modules[name]
        original: Callable[[], Sequence[str]] | None = getattr(module, _COMMAND, None)
        if original is None:
            return  # a Lightning that starts its ranks in another way

        @functools.wraps(original)
        def command() -> Sequence[str]:
            plain = list(original())
            if not plain or plain[0] != sys.executable:
                return plain
            return script_command("torchperfd.__main__", *self._options, *plain[1:])

        self._replaced.append((module, original))
        setattr(module, _COMMAND, command)
