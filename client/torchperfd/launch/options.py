"""The options of ``torchperfd run``: one table for its parser, its help and the completion of shells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple


@dataclass(frozen=True, slots=True)
class KeepingOptions:
    """What becomes of the report at the end of a run.

    Attributes:
        directory: Where it is kept; this user's default if empty.
        is_kept: Whether it is.
        baseline: A file, or the id of a kept run, to compare with; empty for none.
        fail_above: Largest share by which the step may be slower than the baseline's; None for any.
    """

    directory: str = ""
    is_kept: bool = True
    baseline: str = ""
    fail_above: float | None = None


def keeping_options(values: Mapping[str, str], flags: set[str]) -> KeepingOptions:
    """Return the options of a command line.

    Raises:
        ValueError: They are invalid or contradictory; the message has the reason.
    """
    baseline = values.get("--baseline", "")
    if "--fail-above" in values and not baseline:
        raise ValueError("--fail-above needs a --baseline")
    return KeepingOptions(
        directory=values.get("--runs-dir", ""),
        is_kept="--no-keep" not in flags,
        baseline=baseline,
        fail_above=_read_share(values["--fail-above"]) if "--fail-above" in values else None,
    )


def _read_share(text: str) -> float:
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share >= 0):
        raise ValueError(f"--fail-above {text} is no share such as 5% or 0.05")
    return share


_HELP_COLUMN: Final = 18
_HELP_WIDTH: Final = 80


class RunOption(NamedTuple):
    """One option of ``run``.

    Attributes:
        name: With its dashes.
        value: What its value is called in the help; empty for a flag.
        words: What it does.
        takes: What a shell offers as its value: a ``file``, a ``directory``, a kept ``run``, or nothing.
    """

    name: str
    value: str
    words: str
    takes: str = ""


OPTIONS: Final = (
    RunOption(
        "--name",
        "NAME",
        "Name of the run; the launcher's job id by default, or the script's name and a short id. --run is the"
        " same, except under torchrun, which takes it for its own --run-path.",
    ),
    RunOption("--job", "NAME", "What people call this kind of run; the script's name by default."),
    RunOption("--report", "FILE", "Write the account of the run as JSON (schema torchperfd.run/1).", "file"),
    RunOption("--baseline", "RUN", "At the end, compare with a kept run or with a file of --report.", "run"),
    RunOption("--fail-above", "P", "With --baseline: exit with code 7 if a step is slower by more, as 5%."),
    RunOption(
        "--runs-dir", "DIR", "Where the account is kept, for `torchperfd runs` and `compare`.", "directory"
    ),
    RunOption("--no-keep", "", "Keep no account of the run."),
    RunOption(
        "--no-advise",
        "",
        "Make no capture by itself. Without it, five steps are captured once when a cause takes a tenth of"
        " the step for ten seconds; never on CUDA devices.",
    ),
    RunOption("--on-oom", "", "Leave a memory snapshot when CUDA has no memory left."),
    RunOption("--no-daemon", "", "Start no daemon when none answers."),
    RunOption("--open", "", "Open the daemon's live page in a browser."),
    RunOption("--quiet", "", "Print nothing, neither the page's address nor the end."),
    RunOption("--full", "", "Print each rank's whole table at the end, not only the verdict."),
)
HELP_OPTIONS: Final = ("-h", "--help")
MODULE_OPTION: Final = "-m"

_BY_NAME: Final = {option.name: option for option in OPTIONS}
_ALIASES: Final = {"--run": "--name"}
"""Earlier names, which scripts use."""
_HEAD: Final = """\
Usage: torchperfd run [OPTIONS] SCRIPT [ARGS]...
       torchperfd run [OPTIONS] -m MODULE [ARGS]...

  Run a training script under torchperfd, unedited, and say where its time went.

  The script sees the same sys.argv, __main__, stdin, signals and exit code as
  under plain python. When no daemon answers on this node, one is started for
  the time of the run. Under torchrun: torchrun ... -m torchperfd run SCRIPT.

Options:
"""


class BadUsageError(Exception):
    """The command line is invalid; the message has the reason."""


class CommandLine(NamedTuple):
    """A command line of ``run``, up to its script.

    Attributes:
        values: By option, the last of each.
        flags: Those that are set.
        target: The script or module; empty where the words end before it.
        arguments: Everything behind it.
        is_module: Whether ``-m`` is in front of it.
        awaited: The option whose value would come next; empty where the words end elsewhere.
        wants_help: Whether help is asked for; nothing behind that is read.
    """

    values: dict[str, str]
    flags: set[str]
    target: str = ""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    awaited: str = ""
    wants_help: bool = False


def read_words(words: Sequence[str]) -> CommandLine:
    """Read a command line of ``run``, which may end before its script.

    Raises:
        BadUsageError: It has an unknown option.
    """
    line = CommandLine({}, set())
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word in HELP_OPTIONS:
            return line._replace(wants_help=True)
        if word == MODULE_OPTION or not word.startswith("-"):
            is_module = word == MODULE_OPTION
            rest = words[position:] if is_module else words[position - 1 :]
            return line._replace(
                is_module=is_module,
                target=rest[0] if rest else "",
                arguments=tuple(rest[1:]),
                awaited="" if rest else MODULE_OPTION,
            )
        given, equals, value = word.partition("=")
        name = _ALIASES.get(given, given)
        option = _BY_NAME.get(name)
        if option is None or (equals and not option.value):
            raise BadUsageError(_unknown_option(word))
        if not option.value:
            line.flags.add(name)
        elif equals:
            line.values[name] = value
        elif position < len(words):
            line.values[name] = words[position]
            position += 1
        else:
            return line._replace(awaited=given)
    return line


def option_of(name: str) -> RunOption | None:
    return _BY_NAME.get(_ALIASES.get(name, name))


def usage() -> str:
    import textwrap

    rows = [(f"{option.name} {option.value}".rstrip(), option.words) for option in OPTIONS]
    rows.append((", ".join(HELP_OPTIONS), "Show this message and exit."))
    lines = [
        textwrap.fill(
            words,
            _HELP_WIDTH,
            initial_indent=f"  {name}".ljust(_HELP_COLUMN),
            subsequent_indent=" " * _HELP_COLUMN,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, words in rows
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _unknown_option(word: str) -> str:
    from torchperfd.model.formatting import did_you_mean

    hint = did_you_mean(word.partition("=")[0], [*_BY_NAME, *_ALIASES])
    return f"no such option {word!r}" + (f"; {hint}" if hint else "")
