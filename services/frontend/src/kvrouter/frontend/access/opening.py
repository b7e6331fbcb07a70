"""Creates the authentication of a Frontend from its options."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.cache_salts import CacheSalts
from kvrouter.frontend.access.following import FollowedKeys, follow_salt_key
from kvrouter.frontend.access.key_file import KeyFileError
from kvrouter.frontend.access.quotas import LimitTable, Quotas
from kvrouter.frontend.access.refusals import Refusals
from kvrouter.frontend.access.rules import FieldRules
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.process.lifecycle import StartRefused
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from kvrouter.frontend.access.json_web_tokens import FollowedSigningKeys, JsonWebTokens


@dataclass(frozen=True, slots=True)
class OpenedAccess:
    """Authentication, and the tasks keeping it current."""

    access: Access
    keys: FollowedKeys
    signing_keys: FollowedSigningKeys | None
    salt_key: Path | None

    async def run(self) -> None:
        """Follows the files of keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keys.run(), name="api-keys")
            if self.salt_key is not None and self.access.salts is not None:
                group.create_task(follow_salt_key(self.access.salts, self.salt_key), name="salt-key")
            if self.signing_keys is not None:
                group.create_task(self.signing_keys.run(), name="signing-keys")


def open_access(
    settings: FrontendSettings, registry: CollectorRegistry, limits: LimitTable | None = None
) -> OpenedAccess | None:
    """Returns the authentication the options require; None if they require none.

    Args:
        settings: The options.
        registry: Registry for the metrics.
        limits: Counters of limits, shared with other processes; None if there are none.

    Raises:
        StartRefused: a file of keys cannot be used.
    """
    if not settings.api_keys and not settings.jwt_keys:
        return None
    try:
        salt_key = Path(settings.cache_salt_key_file) if settings.cache_salt_key_file else None
        salts = None if salt_key is None else CacheSalts.of_file(salt_key)
    except KeyFileError as error:
        raise StartRefused(f"--cache-salt-key-file: {error}") from None
    try:
        path = settings.api_keys
        keys = FollowedKeys(Path(path) if path else None, registry, can_isolate=salts is not None)
    except KeyFileError as error:
        raise StartRefused(f"--api-keys: {error}") from None
    tokens, signing_keys = _open_tokens(settings, registry) if settings.jwt_keys else (None, None)
    fields = FieldRules(settings.permitted_engine_fields)
    refusals, quotas = Refusals(registry), Quotas(limits or LimitTable())
    access = Access(lambda: keys.keys, tokens, refusals, quotas, salts, fields)
    return OpenedAccess(access, keys, signing_keys, salt_key)


def _open_tokens(settings: FrontendSettings, registry: CollectorRegistry) -> tuple[JsonWebTokens, FollowedSigningKeys]:
    # Imported only here, since PyJWT is an extra.
    try:
        from kvrouter.frontend.access.json_web_tokens import (
            FollowedSigningKeys,
            InvalidKeys,
            JsonWebTokens,
            check_location,
        )
    except ModuleNotFoundError as error:
        raise StartRefused(f"--jwt-keys needs {error.name}: install kvrouter[jwt]") from None
    tokens = JsonWebTokens(settings)
    try:
        check_location(settings.jwt_keys)
        return tokens, FollowedSigningKeys(settings.jwt_keys, tokens, registry)
    except (InvalidKeys, ValueError) as error:
        raise StartRefused(f"--jwt-keys: {error}") from None
