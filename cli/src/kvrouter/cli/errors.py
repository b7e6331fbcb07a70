"""Ways in which a command can fail that its user can do something about."""

from __future__ import annotations

import typer


class WrongUsage(typer.TyperException):
    """The command line cannot be carried out as it is."""

    exit_code = 2


class MissingExtra(WrongUsage):
    """A command needs an extra of kvrouter that is not installed."""

    def __init__(self, command: str, *, extra: str) -> None:
        super().__init__(f"`kvrouter {command}` needs an extra that is not installed: pip install 'kvrouter[{extra}]'")


class CommandFailed(typer.TyperException):
    """The command did not do what it was asked to."""

    exit_code = 1


def reason_of(error: OSError) -> str:
    """What failed and why, without the error's number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
