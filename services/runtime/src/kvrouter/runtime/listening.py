"""The error of servers that cannot listen."""

from __future__ import annotations


class BindFailed(Exception):
    """An address cannot be listened on: it is in use, or not an address of this machine."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: it is in use, or not an address of this machine")
