"""Parses addresses on the command line."""

from __future__ import annotations

from kvrouter.cli.errors import WrongUsage


def parse_address(text: str) -> str:
    """Returns the text if it is host:port.

    Raises:
        WrongUsage: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WrongUsage(f"expected host:port, received {text!r}")
    return text


def is_url(text: str) -> bool:
    """Returns whether the text is a URL of HTTP or HTTPS."""
    return text.startswith(("http://", "https://"))
