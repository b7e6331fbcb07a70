"""Adds the commands that need an extra of kvrouter, or says what to install if it is missing."""

from __future__ import annotations

from importlib.util import find_spec

import typer
from kvrouter.cli.errors import MissingExtra

DEVELOPMENT_COMMANDS = ("certs", "demo", "up", "replay", "simulate", "tune")
"""Commands that need the extra ``devstack``, which is the distribution kvrouter-devstack."""


def add_development_commands(app: typer.Typer) -> None:
    """Adds the commands of the development stack.

    If it is not installed, each command is listed with the extra to install, and fails with ``MissingExtra``.
    """
    if find_spec("kvrouter.devtools") is not None:
        from kvrouter.devcommands.declarations import add_commands

        add_commands(app)
        return
    for name in DEVELOPMENT_COMMANDS:
        app.command(
            name,
            help="Not installed: pip install 'kvrouter[devstack]'.",
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_fail)


def _fail(context: typer.Context) -> None:
    raise MissingExtra(str(context.info_name), extra="devstack")
