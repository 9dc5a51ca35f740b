"""``torchperfd serve``, with flags made of the table of options; ``config`` of this node."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

# The daemon uses no linear algebra, and numpy's starts a thread for every core. Set here, for this process
# alone: other commands start scripts, which would inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchperfd_cli.commands._options import Parsed, json_option
from torchperfd_cli.commands._output import emit, plain
from torchperfd_daemon.config.effective import (
    DEFAULT_ORIGIN,
    SYSTEM_FILE,
    Config,
    as_tables,
    find_files,
    resolve,
)
from torchperfd_daemon.config.kinds import Switch
from torchperfd_daemon.config.options import OPTIONS, Option
from torchperfd_daemon.errors import check_environment
from torchperfd_daemon.text import configure_logging

_Command = TypeVar("_Command", bound=Callable[..., Any])


def serve_flags(*, hidden: bool) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command all flags of ``serve``, and ``--config``."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(OPTIONS):
            command = _flag(option, hidden=hidden or option.flag_only)(command)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            envvar="TORCHPERFD_CONFIG",
            help=f"A TOML file of these options; it comes before {SYSTEM_FILE}.",
        )(command)

    return decorate


def configuration(context: click.Context, config_file: Path | None) -> Config:
    """Return what is in force, given a command's flags.

    Raises:
        ConfigError: A file or a variable has an invalid value.
    """
    given = _given(context)
    if given.get("embedded"):
        # It belongs to one run of this user: the configuration of the node's service does not apply.
        return resolve(given, [])
    check_environment(os.environ)
    return resolve(given, find_files(config_file))


def _flag(option: Option, *, hidden: bool) -> Callable[[_Command], _Command]:
    shown = "" if option.default is None or callable(option.default) else f"  [default: {option.default}]"
    if isinstance(option.kind, Switch):
        names = option.name if option.flag_only else f"{option.name}/--no-{option.name.removeprefix('--')}"
        return click.option(names, option.key, is_flag=True, default=None, hidden=hidden, help=option.help)
    return click.option(
        option.name,
        option.key,
        type=Parsed(option.kind.metavar, lambda text: option.kind.parse(text, Path())),
        metavar=option.kind.metavar,
        hidden=hidden,
        help=f"{option.help}{shown}",
    )


def _given(context: click.Context) -> Mapping[str, Any]:
    return {
        option.key: context.params[option.key]
        for option in OPTIONS
        if context.get_parameter_source(option.key) is ParameterSource.COMMANDLINE
    }


_SWITCH_INTERVAL_S: Final = 0.0005
"""A tenth of Python's default. The event loop releases the interpreter at each system call, and waits for up
to this time to have it again while a thread of the samplers computes."""
_COLLECTED_AFTER: Final = 10_000
"""New objects before Python looks for cycles, 700 by default: reports are freed at once, and leave none."""


@click.command("serve")
@serve_flags(hidden=False)
@click.pass_context
def serve_command(context: click.Context, /, config_file: Path | None, **_: Any) -> None:
    """Run the node's daemon in the foreground.

    It receives step timings over a unix socket, samples the node, and serves Prometheus
    metrics. SIGTERM ends it within 10 seconds; SIGHUP has it read its credentials and certificates again.

    Each option can also be set by a variable (--interval by TORCHPERFD_INTERVAL) and in a file
    (interval = 1.0); `torchperfd config show` prints the values in force.
    """
    config = configuration(context, config_file)
    settings = config.serve_settings()
    configure_logging(settings.log_level, settings.log_format)
    from torchperfd_daemon.server.daemon import Daemon
    from torchperfd_daemon.server.lifecycle import AlreadyServedError

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)

    async def serve() -> None:
        await Daemon(settings, config.plan).run()

    try:
        asyncio.run(serve())
    except AlreadyServedError:
        # Two ranks may start an embedded daemon at once: one of them is enough.
        if not settings.embedded:
            raise


SCHEMA: Final = "torchperfd.config/1"
_COMMENT_COLUMN: Final = 52


@click.group("config")
def config_command() -> None:
    """Show the configuration of `torchperfd serve` and the origin of each value, or check it."""


@config_command.command("show")
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
    emit(_document(config) if as_json else plain(*_lines(config, origin=origin)))


@config_command.command("check")
@serve_flags(hidden=True)
@click.pass_context
def check_config(context: click.Context, /, config_file: Path | None, **_: Any) -> None:
    """Check the configuration, and the files and names in it, without starting a daemon.

    Reads credentials, certificates, the list of peers and triggers as `serve` does: run it as the
    daemon's user. Takes the flags of `serve`, too. Prints one line if a daemon can start with all
    of it, else the first error with what to do about it.
    """
    config = configuration(context, config_file)
    from torchperfd_daemon.server.checked_settings import check_settings

    peers = asyncio.run(check_settings(config.serve_settings()).read_peers())
    origins = [setting.origin for setting in config.settings.values()] + [config.plan_origin]
    sources = [origin for origin in dict.fromkeys(origins) if origin != DEFAULT_ORIGIN]
    triggers = len(config.plan.rules) + len(config.plan.schedules)
    summary = (
        f"the configuration is valid ({', '.join(sources) or 'all defaults'});"
        f" triggers: {triggers}, peers: {len(peers)}"
    )
    emit(plain(summary))


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
    written = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in written)
