"""``torchperfd run``: a script under torchperfd, unedited, in this very process."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchperfd.launch.keeping_options import KeepingOptions, keeping_options
from torchperfd.launch.options import MODULE_OPTION, BadUsageError, CommandLine, read_words, usage
from torchperfd.launch.script import Script, show

if TYPE_CHECKING:
    from torchperfd.runs.record import RunRecord


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
    from torchperfd.launch import auto_capture
    from torchperfd.launch.conclusion import Conclusion
    from torchperfd.launch.lightning import LightningLauncher
    from torchperfd.launch.live_address import announce
    from torchperfd.launch.termination import TerminationWatch
    from torchperfd.link import embedded, stream
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
        daemon = embedded.start_unless_one_answers()
    if daemon is not None:
        stream.load_grpc()
    client = attach(run=options.run, job=options.job or _job_name(script), on_oom=options.on_oom)
    announce(client, quiet=options.quiet, open_page=options.open_page)
    launcher = LightningLauncher(client.run, options.job or _job_name(script))
    auto = auto_capture.begin(client, quiet=options.quiet, switched_off=not options.advise)
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
    from torchperfd.identity import read_identity

    if not options.keeping.baseline or read_identity().rank != 0:
        return None
    from torchperfd.launch.baseline import read_baseline

    try:
        return read_baseline(options.keeping)
    except TorchperfdError as error:
        sys.stderr.write(f"torchperfd: --baseline: {error}\n")
        sys.exit(error.exit_code)


def _job_name(script: Script) -> str:
    return script.target if script.is_module else Path(script.target).stem
