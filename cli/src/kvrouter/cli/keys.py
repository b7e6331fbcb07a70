"""``kvrouter keys …``: manages the file of API keys."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.frontend.access.cache_salts import create_salt_key
from kvrouter.frontend.access.caller import Role
from kvrouter.frontend.access.key_file import (
    KeyEntry,
    KeyFile,
    KeyFileError,
    locked,
    new_key,
    now,
    read_key_file,
    write_key_file,
)

keys_app = typer.Typer(help="Create, list and revoke the API keys of Frontends.", no_args_is_help=True)

File = Annotated[
    Path, typer.Option("--file", envvar="KVROUTER_API_KEYS", help="File of API keys, as given to the Frontends.")
]
KeyId = Annotated[str, typer.Argument(help="Id of the key, of letters, digits, - and _; logs have it.")]
_SECONDS_PER_DAY = 86_400


@keys_app.command("create")
def create(
    key_id: KeyId,
    file: File = Path("keys.json"),
    tenant: Annotated[str, typer.Option(help="Tenant that the key belongs to.")] = "",
    role: Annotated[str, typer.Option(help="What the key permits: client, or admin for every call.")] = "client",
    model: Annotated[
        list[str] | None, typer.Option(help="Model or adapter that the key may use; * stands for any characters.")
    ] = None,
    min_priority: Annotated[int | None, typer.Option(help="Smallest priority of the key's requests.")] = None,
    requests_per_second: Annotated[float | None, typer.Option(help="Most requests per second.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Most prompt and output tokens per minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Most requests at a time.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until the key expires.")] = None,
) -> None:
    """Add a key to the file, and print it: the file has only its hash, so it cannot be shown again."""
    if role not in {each.value for each in Role}:
        raise WrongUsage(f"--role: expected client or admin, received {role!r}")
    try:
        with locked(file):
            content = read_key_file(file) if file.exists() else KeyFile()
            if any(key.id == key_id for key in content.keys):
                raise CommandFailed(f"{file} already has a key {key_id!r}: choose another id")
            key, hashed = new_key(key_id)
            entry = {
                "id": key_id,
                "hash": hashed,
                "tenant": tenant,
                "role": role,
                "models": model or None,
                "min_priority": min_priority,
                "requests_per_second": requests_per_second,
                "tokens_per_minute": tokens_per_minute,
                "concurrency": concurrency,
                "created": now(),
                "expires": None if days is None else int(time.time() + days * _SECONDS_PER_DAY),
            }
            try:
                added = msgspec.convert(entry, KeyEntry)
            except msgspec.ValidationError as error:
                raise WrongUsage(str(error)) from None
            write_key_file(file, msgspec.structs.replace(content, keys=[*content.keys, added]))
    except KeyFileError as error:
        raise CommandFailed(str(error)) from None
    print(key)  # noqa: T201


@keys_app.command("list")
def list_keys(file: File = Path("keys.json")) -> None:
    """Show the keys without their hashes."""
    try:
        content = read_key_file(file)
    except KeyFileError as error:
        raise CommandFailed(str(error)) from None
    from kvrouter.cli.terminal import PlainConsole
    from rich.table import Table

    table = Table("id", "tenant", "role", "models", "created", "state", box=None, pad_edge=False)
    for key in content.keys:
        models = "all" if key.models is None else ", ".join(key.models)
        table.add_row(key.id, key.tenant, key.role.value, models, _date(key.created), _state(key))
    PlainConsole().print(table)


@keys_app.command("revoke")
def revoke(key_id: KeyId, file: File = Path("keys.json")) -> None:
    """Mark a key as revoked. Frontends refuse it within a second; its running requests end normally."""
    try:
        with locked(file):
            content = read_key_file(file)
            if all(key.id != key_id for key in content.keys):
                raise CommandFailed(f"{file} has no key {key_id!r}: see `kvrouter keys list`")
            keys = [
                msgspec.structs.replace(key, revoked=now()) if key.id == key_id and key.revoked is None else key
                for key in content.keys
            ]
            write_key_file(file, msgspec.structs.replace(content, keys=keys))
    except KeyFileError as error:
        raise CommandFailed(str(error)) from None
    print(f"{key_id} revoked")  # noqa: T201


@keys_app.command("create-salt-key")
def create_salt(
    file: Annotated[Path, typer.Option("--file", help="File to write; it must not exist.")] = Path("cache-salt.key"),
) -> None:
    """Write the secret that keys the salts of caches, for --cache-salt-key-file of all Frontends."""
    try:
        create_salt_key(file)
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from None
    print(f"{file} written")  # noqa: T201


def _state(key: KeyEntry) -> str:
    if key.revoked is not None:
        return f"revoked {_date(key.revoked)}"
    if key.expires is None:
        return "valid"
    return f"{'expired' if key.expires <= now() else 'valid until'} {_date(key.expires)}"


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
