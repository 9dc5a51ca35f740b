"""Options that several commands share."""

import click

socket_option = click.option(
    "--socket", envvar="TORCHPERFD_SOCKET", help="Socket of the daemon; the usual places by default."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
