"""What the services of one process share, if the process is the whole system."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.net.local.messages import LocalMessages
from kvrouter.net.local.registry import LocalRegistry
from kvrouter.net.local.states import LocalStates


@dataclass(frozen=True, slots=True)
class LocalSystem:
    """A system in one process."""

    registry: LocalRegistry = field(default_factory=LocalRegistry)
    """In the place of etcd."""
    messages: LocalMessages = field(default_factory=LocalMessages)
    """In the place of NATS."""
    states: LocalStates = field(default_factory=LocalStates)
    """What workers resumed with."""
