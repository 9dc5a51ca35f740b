"""``torchperfd serve``, with flags made of the table of options."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from torchperfd_daemon.config.effective import SYSTEM_FILE, Config, find_files, resolve
from torchperfd_daemon.config.kinds import Kind, Switch
from torchperfd_daemon.config.options import OPTIONS, Option
from torchperfd_daemon.errors import BadValueError, check_environment
from torchperfd_daemon.logs import configure_logging

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Flag(click.ParamType):  # type: ignore[type-arg] # generic from click 8.2 on
    """What a flag's text can be: the same as in the environment."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.name = kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value.

        Raises:
            click.BadParameter: There is none.
        """
        try:
            return self._kind.parse(value, Path())
        except BadValueError as error:
            self.fail(f"{error}.", param, ctx)


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
        type=_Flag(option.kind),
        metavar=option.kind.metavar,
        hidden=hidden,
        help=f"{option.help}{shown}",
    )


def _given(context: click.Context) -> Mapping[str, Any]:
    """Return the values of the flags that were written."""
    return {
        option.key: context.params[option.key]
        for option in OPTIONS
        if context.get_parameter_source(option.key) is ParameterSource.COMMANDLINE
    }


_SWITCH_INTERVAL_S: Final = 0.0005
"""A tenth of Python's default. The event loop releases the interpreter at each system call, and waits for up
to this time to have it again while a thread of the samplers computes."""


@click.command("serve")
@serve_flags(hidden=False)
@click.pass_context
def command(context: click.Context, /, config_file: Path | None, **_: Any) -> None:
    """Run the node's daemon in the foreground.

    It receives step timings over a unix socket, samples the node, and serves Prometheus
    metrics. SIGTERM ends it within 10 seconds; SIGHUP has it read its credentials and certificates again.

    Each option can also be set by a variable (--interval by TORCHPERFD_INTERVAL) and in a file
    (interval = 1.0); `torchperfd config show` prints the values in force.
    """
    config = configuration(context, config_file)
    settings = config.serve_settings()
    configure_logging(settings.log_level)
    from torchperfd_daemon.server.daemon import Daemon
    from torchperfd_daemon.server.listening import AlreadyServedError

    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    async def serve() -> None:
        await Daemon(settings, config.plan).run()

    try:
        asyncio.run(serve())
    except AlreadyServedError:
        # Two ranks may start an embedded daemon at once: one of them is enough.
        if not settings.embedded:
            raise
