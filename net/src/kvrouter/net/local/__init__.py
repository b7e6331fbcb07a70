"""Registrations and messages inside of one process, in the place of etcd and NATS."""

from kvrouter.net.local.messages import LocalMessages
from kvrouter.net.local.registry import LocalKeys, LocalRegistry
from kvrouter.net.local.states import LocalState, LocalStates
from kvrouter.net.local.system import LocalSystem

__all__ = ["LocalKeys", "LocalMessages", "LocalRegistry", "LocalState", "LocalStates", "LocalSystem"]
