"""The parts of the documentation that come from code: whole pages, and sections of pages."""

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from torchperfd.steps.loop_rules import Rule
    from torchperfd_daemon.diagnosis.verdict import Cause

_PUBLIC_MODULES: Final = ("torchperfd", "torchperfd.loggers")
INTEGRATIONS: Final = {
    "torchperfd.integrations.lightning": ("Callback", "Profiler"),
    "torchperfd.integrations.transformers": ("TorchperfdCallback",),
    "torchperfd.integrations.fastai": ("TorchperfdCallback",),
    "torchperfd.integrations.ignite": ("attach",),
}
_INTERNAL: Final = frozenset(
    {
        *("become_inert", "detach_by", "export_metrics", "finish", "on_result", "take_options"),
        *("watch_model", "whole_run"),
    }
)
"""Methods that other modules call, and no script."""
_MADE_BY_CALLS: Final = frozenset({"Capture", "Client", "JobCapture"})
"""Classes that a script does not make itself."""
_NOISE: Final = re.compile(r"\b(?:collections\.abc|pathlib|typing|torchperfd(?:\.\w+)+)\.|~")


def pages() -> dict[str, str]:
    """Return the pages, by file name."""
    return {"verdicts.md": verdicts_page(), "python.md": python_page()}


def sections() -> dict[str, str]:
    """Return the sections that pages mark by ``<!-- generated: NAME -->``, by name."""
    return {
        "commands": commands_section(),
        "options": options_section(),
        "loop rules": loop_rules_section(),
        "conditions of advice": advice_section(),
        "names over OTLP": otlp_section(),
    }


def commands_section() -> str:
    """Return the help of all commands, from the command line itself."""
    from torchperfd.launch.options import usage
    from torchperfd_cli.main import COMMANDS, cli

    lines: list[str] = []
    context = click.Context(cli, info_name="torchperfd", **cli.context_settings)
    for name in COMMANDS:
        if name == "run":  # it hands over to the process that trains
            lines += ["### torchperfd run", "", "```", usage().rstrip(), "```", ""]
            continue
        command = cli.get_command(context, name)
        assert command is not None
        lines += _help_of(command, context, name, "###")
    return "\n".join(lines)


def _help_of(command: click.Command, parent: click.Context, name: str, heading: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=100)
    yield from (f"{heading} {context.command_path}", "", "```", command.get_help(context), "```", "")
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            nested = command.get_command(context, each)
            assert nested is not None
            yield from _help_of(nested, context, each, f"{heading}#")


def options_section() -> str:
    """Return the table of the options of ``serve``, each with its flag, variable, key and default."""
    from torchperfd_daemon.config.options import OPTIONS

    lines = ["| key | flag, variable | default | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        if option.flag_only:
            continue
        default = "computed" if callable(option.default) else _cell(option.default)
        names = f"`{option.name}`, `{option.variable}`"
        lines.append(f"| `{option.key}` | {names} | {default} | {_escaped(option.help)} |")
    return "\n".join([*lines, ""])


def otlp_section() -> str:
    """Return the table of the families whose names over OTLP are those of the conventions."""
    from torchperfd_daemon.push.otlp_names import HARDWARE_NAMES, Instrument

    lines = ["| series | over OTLP | instrument, unit | attributes |", "|---|---|---|---|"]
    for each in HARDWARE_NAMES:
        only = "".join(f'{{{label}="{value}"}}' for label, value in each.only.items())
        attributes = [f"`hw.id` = {' + '.join(f'`{label}`' for label in each.id_labels)}"]
        attributes += [f"`{attribute}` = `{label}`" for label, attribute in each.labels.items()]
        attributes += [f'`{attribute}="{value}"`' for attribute, value in each.constants.items()]
        attributes += ['`hw.state="ok"`, `"failed"`: a point each'] if each.is_status else []
        kind = f"{each.instrument.value}, `{each.unit}`"
        ending = "_total" if each.instrument is Instrument.COUNTER else ""
        lines.append(f"| `{each.family}{ending}{only}` | `{each.name}` | {kind} | {', '.join(attributes)} |")
    return "\n".join([*lines, ""])


def loop_rules_section() -> str:
    """Return the rules of the loop: a table for each event."""
    from torchperfd.steps.loop_rules import DECISIONS

    lines: list[str] = []
    for decision in DECISIONS:
        lines += [f"**{decision.event}**", "", "| held | if | then | held afterwards |", "|---|---|---|---|"]
        lines += [*map(_loop_rule, decision.rules), ""]
    return "\n".join(lines)


def _loop_rule(rule: "Rule") -> str:
    from torchperfd.steps.loop_state import HELD

    held = _words([HELD[kind] for kind in sorted(rule.held)]) or "any"
    when = _words([condition.__name__ for condition in rule.when]) or "always"
    then = _words([action.__name__ for action in rule.then]) or "nothing"
    after = next(filter(None, map(_held_after, reversed(rule.then))), "as before")
    return f"| {held} | {when} | {then} | {after} |"


def _held_after(action: Callable[..., None]) -> str:
    """Return what is held after an action of a rule; empty where that is what was held before."""
    name = action.__name__
    if name in ("rejoin", "release", "release_validate", "discard"):
        return "nothing"
    return name.split("_")[1] if name.startswith("hold_") else ""


def _words(names: list[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)


def advice_section() -> str:
    """Return the table of the rules of advice with what must be true of the run."""
    from torchperfd_daemon.analysis.advice import RULES

    lines = ["| rule | what must be true of the run |", "|---|---|"]
    for rule in RULES:
        lines.append(f"| {rule.name} | {'; '.join(each.text for each in rule.needs) or 'none'} |")
    return "\n".join([*lines, ""])


def verdicts_page() -> str:
    """Return the page of all causes: the least share from which each is reported, and the next command."""
    from torchperfd_daemon.diagnosis.cause_table import MIN_CAUSE_SHARE
    from torchperfd_daemon.diagnosis.remedies import fix_of
    from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, next_command

    lines = [
        "# All verdicts",
        "",
        f"A cause is reported from {MIN_CAUSE_SHARE:.0%} of the step on. Where all ranks have lost the time"
        " alike since the start, the share in the second column counts, because every run loses some.",
        "[Diagnosis](../diagnosis.md#causes) has how each is measured.",
        "",
        "| verdict | reported from, since the start | next command | usual fix |",
        "|---|---|---|---|",
    ]
    shares = _shares_since_start()
    for cause in Cause:
        none = cause in (Cause.HANG, Cause.NONE, Cause.UNKNOWN)
        share = "" if none else f"{shares.get(cause, MIN_CAUSE_SHARE):.0%}"
        link = f"[{cause.value}](../causes/{cause.slug}.md)"
        command = "torchperfd stacks --run RUN" if cause is Cause.HANG else next_command(cause, "RUN")
        fix = fix_of(Verdict(cause, "RUN", "", None, "", "", 0.0, command))
        lines.append(f"| {link} | {share} | `{command}` | {_escaped(fix)} |")
    return "\n".join([*lines, ""])


def _shares_since_start() -> "dict[Cause, float]":
    """Return the least shares of the step for losses of all ranks since the start, by cause."""
    from torchperfd_daemon.diagnosis import cause_table
    from torchperfd_daemon.diagnosis.verdict import Cause

    rows = (*cause_table.MEASURED, cause_table.SYNCHRONISATION, cause_table.HOST_BOUND)
    return {
        **{row.cause: row.ever_since for row in (*rows, cause_table.script_code("other"))},
        Cause.UNEVEN_WORK: cause_table.UNEVEN_SHARE,
        Cause.SCRIPT_COLLECTIVES: cause_table.COLLECTIVES_SHARE,
        Cause.SMALL_BATCHES: cause_table.SMALL_BATCH_SHARE,
    }


def python_page() -> str:
    """Return the page of the Python API, from signatures and docstrings."""
    lines = ["# Python API", "", "From signatures and docstrings. All else in the package may change.", ""]
    for name in _PUBLIC_MODULES:
        module = importlib.import_module(name)
        lines += [f"## {name}", ""]
        for each in sorted(module.__all__):
            if not each.startswith("__"):
                lines += _documented(getattr(module, each), f"{name}.{each}", "###")
    lines += [
        "## torchperfd.integrations",
        "",
        "[Frameworks](../integrations.md) has what each adds.",
        "",
    ]
    lines += [f"- `{name}`: `{'`, `'.join(classes)}`" for name, classes in INTEGRATIONS.items()]
    return "\n".join([*lines, ""])


def _documented(thing: Any, name: str, heading: str) -> Iterator[str]:
    yield from (f"{heading} {name}", "")
    is_shown = not (inspect.isclass(thing) and issubclass(thing, BaseException | enum.Enum))
    is_shown = is_shown and not getattr(thing, "_is_protocol", False)
    if callable(thing) and is_shown and thing.__name__ not in _MADE_BY_CALLS:
        yield from ("```", _signature(thing, name.rpartition(".")[2]), "```", "")
    yield from (*_docstring(thing), "")
    if not inspect.isclass(thing) or issubclass(thing, BaseException):
        return
    for each, member in inspect.getmembers(thing):
        if each.startswith("_") or each in _INTERNAL or each not in vars(thing):
            continue
        if isinstance(member, property) or inspect.isfunction(member):
            yield from _member(each, member)


def _member(name: str, member: property | Callable[..., Any]) -> Iterator[str]:
    if isinstance(member, property):
        yield from (f"#### {name}", "", *_docstring(member), "")
        return
    yield from (f"#### {name}()", "", "```", _signature(member, name), "```", "", *_docstring(member), "")


def _signature(thing: Callable[..., Any], name: str) -> str:
    """Return a signature, one argument a line if it is long."""
    signature = inspect.signature(thing)
    kept = [each for each in signature.parameters.values() if each.name != "self"]
    text = _NOISE.sub("", f"{name}{signature.replace(parameters=kept)}")
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    if len(text) <= 100:
        return text
    inner, _, rest = text[len(name) + 1 :].rpartition(")")
    return f"{name}(\n    " + ",\n    ".join(_split(inner)) + f",\n){rest}"


def _split(arguments: str) -> Iterator[str]:
    """Yield the arguments of a signature: split at commas that are in no bracket."""
    depth, began = 0, 0
    for position, character in enumerate(arguments):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield arguments[began:position].strip()
            began = position + 1
    yield arguments[began:].strip()


def _docstring(thing: Any) -> list[str]:
    """Return a docstring as Markdown: code in single quotes, sections as lists."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines: list[str] = []
    for line in text.splitlines():
        if section := re.fullmatch(r"(Args|Raises|Returns|Attributes|Yields):", line):
            lines += [f"**{section[1]}**", ""]
        elif entry := re.fullmatch(r"    (\*{0,2}\w+): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif line.startswith("        ") and lines and lines[-1].startswith(("- ", "  ")):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return lines


def _cell(value: object) -> str:
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _escaped(text: str) -> str:
    text = re.sub(r"(?<!`)\b__\w+__\b", r"`\g<0>`", text)
    return text.replace("|", "\\|").replace("<", "&lt;")
