"""Help of programs whose options are settings, without the settings, which take half a second to import.

`make reference` writes the pages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PAGES = Path(__file__).parent / "help"


def stored_help(program: str, arguments: Sequence[str]) -> str | None:
    """Returns the page of a program, such as ``frontend``, if the arguments ask for help alone; None otherwise."""
    if list(arguments) not in (["--help"], ["-h"]):
        return None
    page = PAGES / f"{program}.txt"
    return page.read_text(encoding="utf-8") if page.exists() else None


def exit_with_help(program: str, arguments: Sequence[str] | None = None) -> None:
    """Prints the page of a program and ends it, if its arguments, by default the process's, ask for help alone."""
    page = stored_help(program, sys.argv[1:] if arguments is None else arguments)
    if page is not None:
        sys.stdout.write(page)
        sys.exit(0)
