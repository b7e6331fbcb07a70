"""Rules for the requests of a caller. Pure: each one raises, or returns after keying the request's salt."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from kvrouter.engines.fields import HARMLESS, HARMLESS_OPTIONS, INTERNAL_PART_FIELDS, INTERNAL_TEMPLATE_FIELDS
from kvrouter.frontend.access.cache_salts import CacheSalts
from kvrouter.frontend.access.caller import Caller, Role
from kvrouter.frontend.access.refusals import RefusalReason, RuleBroken
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.v1.common_pb2 import BlockScope, BookingKey, RoutingRequest
from kvrouter.v1.frontend_pb2 import Model

_MOST_NAMED = 8
_MOST_CHARACTERS = 64
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]", re.IGNORECASE)
_PART_FIELD = re.compile("|".join(f'"{name}"' for name in sorted(INTERNAL_PART_FIELDS)).encode())
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANYTHING = msgspec.json.Decoder()
_OPTIONS_FIELD = "sampling_options.engine_options_json"
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class FieldRules:
    """The fields clients may set: the harmless ones of each path, and those the operator permits."""

    def __init__(self, permitted: Collection[str] = ()) -> None:
        """``permitted`` are further fields, none of them internal."""
        permitted = frozenset(permitted)
        self._fields = {path: names | permitted for path, names in HARMLESS.items()}
        self._options = HARMLESS_OPTIONS | permitted

    def check_body(self, path: str, body: Mapping[str, msgspec.Raw]) -> None:
        """Checks a body for an engine's API.

        Args:
            path: Path of the API. At others, which only administrators reach, every field is permitted.
            body: Its fields, encoded.

        Raises:
            RuleBroken: a field is not permitted.
        """
        if path not in self._fields:
            return
        _refuse(body.keys() - self._fields[path])
        _refuse(_template_fields(body.get("chat_template_kwargs")), "chat_template_kwargs.")
        for name in ("messages", "input"):
            _refuse(_part_fields(body.get(name)), f"{name}.content.")

    def check_options(self, options_json: str) -> None:
        """Checks options for the engine alone. Anything but a JSON object is left for the worker to refuse.

        Raises:
            RuleBroken: an option is not permitted.
        """
        if not options_json:
            return
        try:
            names = _KEYS.decode(options_json).keys()
        except _MALFORMED:
            return
        _refuse(names - self._options, f"{_OPTIONS_FIELD}.")


def _refuse(names: Iterable[str], prefix: str = "") -> None:
    refused = sorted(names)
    if not refused:
        return
    named = ", ".join(repr(name[:_MOST_CHARACTERS]) for name in refused[:_MOST_NAMED])
    more = f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
    raise RuleBroken(
        RefusalReason.FIELD,
        f"the caller may not set {named}{more}: expected fields of prompt, sampling and response only",
        field=f"{prefix}{refused[0][:_MOST_CHARACTERS]}",
        advice="Leave it out. An operator permits harmless fields with --permitted-engine-fields.",
    )


def _template_fields(encoded: msgspec.Raw | None) -> Iterable[str]:
    try:
        return _KEYS.decode(encoded).keys() & INTERNAL_TEMPLATE_FIELDS if encoded is not None else ()
    except _MALFORMED:
        return ()  # No object: the engine refuses it.


def _part_fields(encoded: msgspec.Raw | None) -> set[str]:
    """Returns the internal fields of the parts of messages. They are decoded only if they may have one."""
    if encoded is None:
        return set()
    raw = bytes(encoded)
    if not _PART_FIELD.search(raw) and not _ESCAPED_LETTER.search(raw):
        return set()
    try:
        return set(_in_messages(_ANYTHING.decode(raw)))
    except _MALFORMED:
        return set()


def _in_messages(messages: Any) -> Iterable[str]:
    for message in messages if isinstance(messages, list) else ():
        # An item of a response's input may be a part itself.
        yield from _in_part(message)


def _in_part(part: Any) -> Iterable[str]:
    """Yields the internal fields of a message or part, and of the parts in its content."""
    if not isinstance(part, dict):
        return
    yield from part.keys() & INTERNAL_PART_FIELDS
    if isinstance(kind := part.get("type"), str) and kind in INTERNAL_PART_FIELDS:
        yield kind
    for name, value in part.items():
        if name == "content" or name.endswith(("_url", "_audio")):
            for each in value if isinstance(value, list) else (value,):
                yield from _in_part(each)


_MARK = ":"
"""Separates a tenant from the booking id of its client. No tenant's name has it."""


def check_model(caller: Caller, model: str) -> None:
    """Checks the permission of a caller for a model or adapter. The error is the same whether the model exists or not.

    Raises:
        RuleBroken: it may not.
    """
    if not caller.may_use(model):
        raise RuleBroken(RefusalReason.MODEL, f"the caller may not use the model {model[:128]!r}", field="model")


def check_generation(caller: Caller, request: GenerateRequest, fields: FieldRules, salts: CacheSalts | None) -> None:
    """Checks a generation request, and keys its salt.

    Raises:
        RuleBroken: another model, tenant or priority is needed, or an engine's option is not permitted.
    """
    check_model(caller, request.model)
    _check_priority(caller, request.priority)
    fields.check_options(request.sampling.engine_options_json or "")
    if request.scope is not None or caller.isolated:
        request.scope = scope = request.scope or BlockScope()
        _check_scope(caller, scope, salts)


def check_routing(
    caller: Caller, request: RoutingRequest, model: str, salts: CacheSalts | None, *, isolates_tenants: bool
) -> None:
    """Checks a routing request for a model, and keys its salt.

    Hashes a client computed itself may be those of any tenant's prompts, so the overlap would reveal what another
    tenant has cached.

    Raises:
        RuleBroken: another model, tenant or priority is needed, or hashes are sent while tenants are isolated.
    """
    check_model(caller, model)
    _check_priority(caller, request.priority)
    if "local_hashes" in request and isolates_tenants and caller.role is not Role.ADMIN:
        raise RuleBroken(
            RefusalReason.TENANT,
            "expected token_ids instead of local_hashes: tenants are isolated",
            field="local_hashes",
        )
    if "local_hashes" in request and salts is not None and (request.scope.cache_salt or request.scope.tenant):
        raise RuleBroken(
            RefusalReason.TENANT,
            "expected token_ids instead of local_hashes: they have another salt than the blocks, whose salt is keyed",
            field="local_hashes",
            advice="Send token_ids.",
        )
    if "scope" in request or caller.isolated:
        _check_scope(caller, request.scope, salts)


def check_engine_request(
    caller: Caller, model: str, priority: int, fields: FieldRules, path: str, body: Mapping[str, msgspec.Raw]
) -> None:
    """Checks a request whose body an engine parses itself.

    Args:
        caller: The caller.
        model: Model of the request.
        priority: Its priority.
        fields: The fields clients may set.
        path: Path of the engine's API.
        body: Fields of the body, encoded.

    Raises:
        RuleBroken: another model or priority is needed, or a field is not permitted.
    """
    check_model(caller, model)
    _check_priority(caller, priority)
    fields.check_body(path, body)


def own_booking(caller: Caller, booking: BookingKey) -> None:
    """Makes a client's booking id one of its tenant, so no tenant can end another's booking."""
    booking.request_id = owned_id(caller, booking.request_id)


def owned_id(caller: Caller, chosen: str) -> str:
    """Returns an id a client chose, as one that only its tenant can name. An empty one stays empty."""
    return f"{caller.tenant}{_MARK}{chosen}" if chosen else ""


def visible(caller: Caller, models: Iterable[Model]) -> list[Model]:
    """Returns the models a caller may use, or of which it may use an adapter, with only those adapters."""
    if caller.models is None:
        return list(models)
    shown = []
    for model in models:
        adapters = [name for name in model.lora_names if caller.may_use(name)]
        if adapters or caller.may_use(model.name):
            copy = Model()
            copy.CopyFrom(model)
            copy.lora_names[:] = adapters
            shown.append(copy)
    return shown


def _check_priority(caller: Caller, priority: int) -> None:
    if caller.min_priority is not None and priority < caller.min_priority:
        raise RuleBroken(
            RefusalReason.PRIORITY,
            f"expected a priority of at least {caller.min_priority}, received {priority}",
            field="priority",
        )


def _check_scope(caller: Caller, scope: BlockScope, salts: CacheSalts | None) -> None:
    """Checks adapter and tenant of a scope, and keys tenant and salt together as its salt."""
    if scope.lora_name:
        check_model(caller, scope.lora_name)
    own = caller.cache_tenant
    if scope.tenant and scope.tenant != own and caller.role is not Role.ADMIN:
        raise RuleBroken(RefusalReason.TENANT, "the caller may not use the cache of that tenant", field="scope.tenant")
    scope.tenant = scope.tenant or own
    if salts is not None:
        scope.cache_salt = salts.of(scope.tenant, scope.cache_salt)
        scope.ClearField("tenant")
