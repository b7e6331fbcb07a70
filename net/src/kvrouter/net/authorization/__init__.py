"""Decides which process may call which method of a service."""

from kvrouter.net.authorization.callers import CallerCheck

__all__ = ["CallerCheck"]
