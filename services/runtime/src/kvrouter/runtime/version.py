"""Which release this is."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("kvrouter")
"""Version of the services and of the command, which are released together."""
