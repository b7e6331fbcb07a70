"""Ways in which a command can fail that its user can do something about."""

from __future__ import annotations

import typer


class WrongUsage(typer.TyperException):
    """The command line cannot be carried out as it is."""

    exit_code = 2


class CommandFailed(typer.TyperException):
    """The command did not do what it was asked to."""

    exit_code = 1


def reason_of(error: OSError) -> str:
    """What failed and why, without the error's number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
