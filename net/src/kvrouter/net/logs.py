"""Loggers of the libraries an engine links: structlog where the process configured it, else logging."""

from __future__ import annotations

import logging
from typing import Any

import structlog


class LibraryLogger:
    """A structlog logger apart from the process's output.

    Unconfigured, structlog prints every line to standard output, which belongs to the engine. Such lines go to the
    standard library's logging instead, where the engine's own configuration applies to them.
    """

    def __init__(self, name: str) -> None:
        """``name`` is the module's."""
        self._name = name

    def __getattr__(self, method: str) -> Any:
        # Chosen at every call: libraries are imported before a process configures its logs.
        return getattr(self._chosen(), method)

    def _chosen(self) -> Any:
        if structlog.is_configured():
            return structlog.get_logger(self._name)
        return structlog.wrap_logger(
            logging.getLogger(self._name),
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
        )


def get_logger(name: str) -> LibraryLogger:
    """Returns the logger of a module of a library."""
    return LibraryLogger(name)
