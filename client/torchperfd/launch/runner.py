"""``torchperfd run``: a script under torchperfd, unedited, in this very process.

Lightning starts the script once more for every further rank of the node, as plain Python. Here that command
becomes one of ``torchperfd run`` with the same run's name, so that all ranks are in one run and its report.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from torchperfd.launch.options import (
    MODULE_OPTION,
    BadUsageError,
    CommandLine,
    KeepingOptions,
    keeping_options,
    read_words,
    usage,
)
from torchperfd.launch.script import Script, show
from torchperfd.model.own_commands import own_command, script_command
from torchperfd.v1.variables import known_environment

if TYPE_CHECKING:
    from torchperfd.client import Client
    from torchperfd.report.record import RunRecord


def announce_page(client: "Client", *, quiet: bool, open_page: bool) -> None:
    """Print the page's address as soon as the daemon has named it, and open it where that is asked for.

    Only rank 0 does so, and only for a daemon with a page.

    Args:
        quiet: Print nothing.
        open_page: Start ``torchperfd open``, which finds a browser and the page's token.
    """
    if client.rank != 0 or (quiet and not open_page):
        return

    def on_page(metrics_url: str) -> None:
        if not quiet:
            sys.stderr.write(f"torchperfd: live page at {metrics_url.removesuffix('metrics')}\n")
            sys.stderr.flush()
        if open_page:
            _open_page(client.run)

    client.parts.daemon_session.when_page_is_known(on_page)


def _open_page(run: str) -> None:
    # Its name may be another one on this node, and the page then shows all runs.
    subprocess.Popen(
        own_command("torchperfd_daemon", "open", "--run", run),
        env=known_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


_LAUNCHER_MODULES: Final = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in ("lightning.fabric", "lightning_fabric")
)
_LAUNCH_COMMAND: Final = "_basic_subprocess_cmd"


class LightningLauncher:
    """Waits for the module with Lightning's launcher, and puts the ranks that it starts into a run.

    Args:
        run: The run's name.
        job: What people call this kind of run.
    """

    def __init__(self, run: str, job: str) -> None:
        from torchperfd.hooks.patches import ModuleImport

        self._options = ("run", "--quiet", "--no-daemon", "--run", run, "--job", job)
        self._replaced: list[tuple[ModuleType, Callable[[], Sequence[str]]]] = []
        self._pending = [
            ModuleImport(name, functools.partial(self._follow, name)) for name in _LAUNCHER_MODULES
        ]
        for pending in self._pending:
            pending.wait()

    def leave(self) -> None:
        """Wait no longer, and put the launcher back as it was."""
        for pending in self._pending:
            pending.cancel()
        for module, original in self._replaced:
            setattr(module, _LAUNCH_COMMAND, original)

    def _follow(self, name: str) -> None:
        module = sys.modules[name]
        original: Callable[[], Sequence[str]] | None = getattr(module, _LAUNCH_COMMAND, None)
        if original is None:
            return  # a Lightning that starts its ranks in another way

        @functools.wraps(original)
        def command() -> Sequence[str]:
            plain = list(original())
            if not plain or plain[0] != sys.executable:
                return plain
            return script_command("torchperfd.__main__", *self._options, *plain[1:])

        self._replaced.append((module, original))
        setattr(module, _LAUNCH_COMMAND, command)


@dataclass(slots=True)
class RunOptions:
    """Options on the command line of ``run``, and where its script is: a module's file is known later."""

    script: Script
    run: str | None = None
    job: str | None = None
    report: Path | None = None
    start_daemon: bool = True
    quiet: bool = False
    full: bool = False
    advise: bool = True
    on_oom: bool = False
    open_page: bool = False
    warnings: list[str] = field(default_factory=list)
    keeping: KeepingOptions = field(default_factory=KeepingOptions)
    began: float = field(default_factory=time.time, compare=False)
    location: str = ""


def main(argv: Sequence[str]) -> None:
    """Run a script as ``torchperfd run`` does; leaves as the script leaves."""
    try:
        options = parse(argv)
    except BadUsageError as error:
        joint = " " if str(error).endswith("?") else "; "
        sys.stderr.write(f"torchperfd: {error}{joint}see `torchperfd run --help`\n")
        sys.exit(2)
    if options is None:
        sys.stdout.write(usage())
    else:
        _run(options)


def parse(argv: Sequence[str]) -> RunOptions | None:
    """Read the command line; None when it asks for help. Everything after the script is the script's.

    Raises:
        BadUsageError: An unknown option, a missing value or no script.
    """
    line = read_words(argv)
    if line.wants_help:
        return None
    if line.awaited:
        raise BadUsageError(
            f"{line.awaited} needs a {'module' if line.awaited == MODULE_OPTION else 'value'}"
        )
    if not line.target and not line.is_module:
        raise BadUsageError("no script given")
    return _options(line)


def _options(line: CommandLine) -> RunOptions:
    values, flags = line.values, line.flags
    try:
        keeping = keeping_options(values, flags)
    except ValueError as error:
        raise BadUsageError(str(error)) from None
    return RunOptions(
        script=Script(line.target, line.arguments, is_module=line.is_module),
        run=values.get("--name"),
        job=values.get("--job"),
        report=Path(values["--report"]).absolute() if "--report" in values else None,
        start_daemon="--no-daemon" not in flags,
        quiet="--quiet" in flags,
        full="--full" in flags,
        advise="--no-advise" not in flags,
        on_oom="--on-oom" in flags,
        keeping=keeping,
        open_page="--open" in flags,
    )


def _run(options: RunOptions) -> None:
    from torchperfd.attachment import attach
    from torchperfd.launch import additions
    from torchperfd.launch.conclusion import Conclusion
    from torchperfd.launch.script import TerminationWatch
    from torchperfd.link import stream
    from torchperfd.safety.logs import log

    script = options.script
    if not script.is_module and not Path(script.target).is_file():
        sys.stderr.write(f"torchperfd: can't open file {script.target!r}; is the path right?\n")
        sys.exit(3)
    # The script may change its directory.
    options.location = "" if script.is_module else os.path.realpath(script.target)
    # The identity, read in attach, names the run after the script.
    sys.argv = [script.target, *script.arguments]
    baseline = _baseline(options)
    daemon = None
    if options.start_daemon and int(os.environ.get("LOCAL_RANK", "0") or 0) == 0:
        daemon = additions.start_unless_one_answers()
    if daemon is not None:
        stream.load_grpc()
    client = attach(run=options.run, job=options.job or _job_name(script), on_oom=options.on_oom)
    announce_page(client, quiet=options.quiet, open_page=options.open_page)
    launcher = LightningLauncher(client.run, options.job or _job_name(script))
    auto = additions.begin(client, quiet=options.quiet, switched_off=not options.advise)
    conclusion = Conclusion(client, daemon, options, baseline, auto)
    termination = TerminationWatch(conclusion.conclude_terminated)
    ended: BaseException | None = None
    code = 0
    # Until its end, standard error belongs to the script.
    log.hold()
    try:
        termination.begin()
        script.execute()
    except SystemExit as error:
        ended = error
    except BaseException as error:  # noqa: BLE001 - shown now, and raised again below
        show(error)
        ended = error
    finally:
        termination.claim()
        launcher.leave()
        try:
            code = conclusion.conclude(ended)
        except KeyboardInterrupt as error:
            sys.stderr.write("torchperfd: interrupted before the end of the run was shown\n")
            ended = ended or error
        except Exception as error:  # noqa: BLE001 - the script has done its work: keep its exit code
            sys.stderr.write(f"torchperfd: the report could not be made: {error}\n")
    termination.end()
    if ended is not None:
        if not isinstance(ended, SystemExit):
            # Shown already. Raised again so that the interpreter ends as it would have: with
            # status 1, or for KeyboardInterrupt by the signal itself.
            sys.excepthook = lambda *_: None
            raise ended
        if ended.code not in (None, 0):
            raise ended
    if code:
        sys.exit(code)
    if ended is not None:
        raise ended


def _baseline(options: RunOptions) -> "RunRecord | None":
    """Read the run to compare with; leaves before the script has begun where there is none."""
    from torchperfd.errors import TorchperfdError
    from torchperfd.model.identity import read_identity

    if not options.keeping.baseline or read_identity().rank != 0:
        return None
    from torchperfd.launch.earlier_runs import read_baseline

    try:
        return read_baseline(options.keeping)
    except TorchperfdError as error:
        sys.stderr.write(f"torchperfd: --baseline: {error}\n")
        sys.exit(error.exit_code)


def _job_name(script: Script) -> str:
    return script.target if script.is_module else Path(script.target).stem
