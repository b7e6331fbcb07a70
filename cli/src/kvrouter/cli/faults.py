"""Ways in which a command can fail that its user can do something about."""

from __future__ import annotations

import typer


class WrongUsage(typer.TyperException):
    """The command line cannot be carried out as it is."""

    exit_code = 2


class CommandFailed(typer.TyperException):
    """The command did not do what it was asked to."""

    exit_code = 1
