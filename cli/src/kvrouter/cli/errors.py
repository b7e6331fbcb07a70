"""Failures of a command that its user can correct."""

from __future__ import annotations

import typer


class WrongUsage(typer.TyperException):
    """The command line is invalid."""

    exit_code = 2


class MissingExtra(WrongUsage):
    """A command needs an extra of kvrouter that is not installed."""

    def __init__(self, command: str, *, extra: str) -> None:
        super().__init__(f"`kvrouter {command}` needs an extra that is not installed: pip install 'kvrouter[{extra}]'")


class CommandFailed(typer.TyperException):
    """The command failed."""

    exit_code = 1


def reason_of(error: OSError) -> str:
    """Returns the file and the reason of an error, without its number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
