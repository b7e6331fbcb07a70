"""The version of this release."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("kvrouter")
"""Version of the services and the command, which are released together."""
