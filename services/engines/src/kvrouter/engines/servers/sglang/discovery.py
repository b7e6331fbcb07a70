"""Reads what an SGLang server says of itself."""

from __future__ import annotations

import msgspec
from kvrouter.engines.relay.engine_sockets import Endpoints
from kvrouter.engines.servers.description import Discovered, EngineRole, Models, at_host, read_models, tcp
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer

_PATHS = ("/server_info", "/get_server_info")
"""Newer and older path of the same page."""
_ROLES: dict[str, EngineRole] = {"prefill": "prefill", "decode": "decode"}


class KvEvents(msgspec.Struct):
    """How the server publishes its events."""

    endpoint_port_base: int
    endpoint_host: str = "*"
    replay_endpoint_port_base: int | None = None
    replay_endpoint_host: str | None = None
    topic: str | None = None
    block_size: int | None = None
    dp_size: int | None = None
    load_endpoint_port_base: int | None = None
    load_endpoint_host: str | None = None
    load_topic: str | None = None


class InternalState(msgspec.Struct):
    """What the scheduler of a rank says."""

    effective_max_running_requests_per_dp: int | None = None


class ServerInfo(msgspec.Struct):
    """The parts of ``/server_info`` that matter here."""

    model_path: str
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    page_size: int | None = None
    dp_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    """The option, for all ranks together; None if the server chose a limit."""
    internal_states: tuple[InternalState, ...] = ()
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    kv_events: KvEvents | None = None
    schedule_low_priority_values_first: bool = False


async def read_server_info(http: EngineHttp) -> ServerInfo:
    """Returns the page.

    Raises:
        EngineAway: the server does not answer, or is not ready yet.
        UnexpectedAnswer: it has no such page, or another one.
    """
    path, older = _PATHS
    try:
        return await http.get_as(path, ServerInfo)
    except UnexpectedAnswer as error:
        if error.status != 404:
            raise
    return await http.get_as(older, ServerInfo)


async def discover(http: EngineHttp) -> Discovered:
    """Returns what the engine says of itself.

    Raises:
        EngineAway: it does not answer, or is not ready yet.
    """
    found = Discovered("sglang")
    try:
        take(found, await read_server_info(http), http.host)
        found.is_identified = True
    except UnexpectedAnswer as error:
        found.problems |= dict.fromkeys(("model", "block_size", "events"), str(error))
    listed = Discovered("sglang")
    try:
        read_models(listed, await http.get_as("/v1/models", Models))
    except UnexpectedAnswer:
        return found
    found.max_model_len, found.lora_names = listed.max_model_len, listed.lora_names
    return found


def take(found: Discovered, info: ServerInfo, host: str) -> None:
    """Takes what the page says. ``host`` is that of the server."""
    events = info.kv_events
    found.model = info.served_model_name or info.model_path
    found.tokenizer = info.tokenizer_path or info.model_path
    found.block_size = (events.block_size if events else None) or info.page_size or None
    ranks = (events.dp_size if events else None) or info.dp_size or 1
    blocks = (info.max_total_num_tokens or 0) // found.block_size if found.block_size else 0
    found.ranks = dict.fromkeys(range(ranks), blocks or None)
    limits = [each.effective_max_running_requests_per_dp for each in info.internal_states]
    said = [limit for limit in limits if limit]
    found.max_sequences = min(said) if said else (info.max_running_requests or 0) // ranks or None
    found.smaller_priority_first = info.schedule_low_priority_values_first
    found.role = _ROLES.get(info.disaggregation_mode or "", "both")
    if found.role == "prefill":
        found.bootstrap_port = info.disaggregation_bootstrap_port
    if events is None:
        found.events = {}
        return
    live = at_host(tcp(events.endpoint_host, events.endpoint_port_base), host)
    replay = ""
    if events.replay_endpoint_port_base:
        replay = at_host(tcp(events.replay_endpoint_host or "*", events.replay_endpoint_port_base), host)
    found.events = {rank: Endpoints.of_rank(live, replay, events.topic or "", rank) for rank in range(ranks)}
    if events.load_endpoint_port_base:
        load = at_host(tcp(events.load_endpoint_host or events.endpoint_host, events.load_endpoint_port_base), host)
        topic = events.load_topic or "load"
        found.load_sockets = {rank: Endpoints.of_rank(load, "", topic, rank) for rank in range(ranks)}
