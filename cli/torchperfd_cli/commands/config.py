"""``torchperfd config``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from torchperfd_cli.commands._options import json_option
from torchperfd_cli.commands.serve import configuration, serve_flags
from torchperfd_daemon.config.effective import Config, as_tables
from torchperfd_daemon.config.options import OPTIONS

SCHEMA: Final = "torchperfd.config/1"
_COMMENT_COLUMN: Final = 52


@click.group("config")
def command() -> None:
    """Show the configuration of `torchperfd serve`, and the origin of each value."""


@command.command("show")
@serve_flags(hidden=True)
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@json_option
@click.pass_context
def show_config(
    context: click.Context, /, config_file: Path | None, origin: bool, as_json: bool, **_: Any
) -> None:
    """Print the configuration in force, as a file that could be given to --config.

    Takes the flags of `serve`, too: they come before TORCHPERFD_* variables, which come before
    --config FILE, /etc/torchperfd/config.toml and the defaults.
    """
    config = configuration(context, config_file)
    if as_json:
        click.echo(json.dumps(_document(config)))
        return
    for line in _lines(config, origin=origin):
        click.echo(line)


def _document(config: Config) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "options": {
            key: {"value": value, "origin": config.settings[key].origin} for key, value in _values(config)
        },
        "triggers": {
            "per_day": config.plan.per_day,
            "origin": config.plan_origin,
            "rules": as_tables(config.plan),
        },
    }


def _lines(config: Config, *, origin: bool) -> Iterator[str]:
    for key, value in _values(config):
        line = f"# {key} is not set" if value is None else f"{key} = {_toml(value)}"
        yield f"{line:<{_COMMENT_COLUMN}}  # {config.settings[key].origin}" if origin else line
    plan = config.plan
    yield "\n[triggers]" + (f"{'':<{_COMMENT_COLUMN - 10}}  # {config.plan_origin}" if origin else "")
    yield f"per_day = {plan.per_day}"
    for table in as_tables(plan):
        yield "\n[[trigger]]"
        for key, value in table.items():
            yield f"{key} = {_toml(value)}"


def _values(config: Config) -> Iterator[tuple[str, object]]:
    """Yield each option's key, and its value as a file would have it."""
    for option in OPTIONS:
        if not option.flag_only:
            value = config.settings[option.key].value
            yield option.key, None if value is None else option.kind.show(value)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    # Text, numbers, lists of them, true and false are written the same in JSON.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
