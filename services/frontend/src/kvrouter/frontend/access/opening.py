"""Creates the authentication of a Frontend from its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.following import FollowedKeys
from kvrouter.frontend.access.key_file import KeyFileError
from kvrouter.frontend.access.limit_table import LimitTable
from kvrouter.frontend.access.quotas import Quotas
from kvrouter.frontend.access.refusals import Refusals
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.process.lifecycle import StartRefused
from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True)
class OpenedAccess:
    """Authentication with what keeps it current."""

    access: Access
    keys: FollowedKeys

    async def run(self) -> None:
        """Follows the file of API keys until cancelled."""
        await self.keys.run()


def open_access(
    settings: FrontendSettings, registry: CollectorRegistry, limits: LimitTable | None = None
) -> OpenedAccess | None:
    """Returns the authentication that the options require; None if they require none.

    Args:
        settings: The options.
        registry: Registry for the metrics.
        limits: Counters of limits that other processes share; None if there are none.

    Raises:
        StartRefused: the file of API keys cannot be used.
    """
    if not settings.api_keys:
        return None
    try:
        keys = FollowedKeys(Path(settings.api_keys), registry)
    except KeyFileError as error:
        raise StartRefused(f"--api-keys: {error}") from None
    return OpenedAccess(Access(lambda: keys.keys, None, Refusals(registry), Quotas(limits or LimitTable())), keys)
