"""The models of ``GET /v1/models``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from kvrouter.engines.fields import CHATS, COMPLETIONS, MESSAGES, RESPONSES
from kvrouter.engines.routes import served_by
from kvrouter.frontend.request.model_rules import ModelRule
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.v1.frontend_pb2 import Model
from kvrouter.v1.registry_pb2 import WorkerRegistration

_GENERATION = frozenset({CHATS, COMPLETIONS, MESSAGES, RESPONSES})
"""Routes every model has, at an engine or over tokens."""


def model_objects(models: Iterable[Model], served: ServedModels, passed: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns models by name, then LoRA adapters, which name their model as parent as in vLLM.

    Args:
        models: The models.
        served: Their workers.
        passed: Further routes that are passed on to engines.
    """
    objects: dict[str, dict[str, Any]] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for model in models:
        routes = _routes(served.engines(model.name), passed)
        objects[model.name] = _model_object(model, model.name, None, routes)
        for name in model.lora_names:
            adapters.setdefault(name, _model_object(model, name, model.name, routes))
    return {**objects, **{name: adapter for name, adapter in adapters.items() if name not in objects}}


def named_objects(models: Mapping[str, dict[str, Any]], rules: Mapping[str, ModelRule]) -> dict[str, dict[str, Any]]:
    """Returns models and the names that the file of models adds, each with the models that serve it.

    A name is listed if one of its models besides the canary is, and described as the first that is. Models not listed
    are not named.

    Args:
        models: The listed models and adapters.
        rules: The entries of the file.
    """
    objects = dict(models)
    for name, rule in rules.items():
        listed = [model for model in (rule.serves or name, *rule.fallbacks) if model in models]
        canary = rule.canary if rule.canary is not None and rule.canary.model in models else None
        if not listed:
            continue
        objects[name] = models[listed[0]] | {
            "id": name,
            "pools": rule.pools,
            "fallbacks": listed[1:] if listed[:1] == [rule.serves or name] else listed,
            "canary": None if canary is None else {"model": canary.model, "share": canary.share},
        }
    return objects


def _routes(engines: Sequence[WorkerRegistration], passed: Collection[str]) -> list[str]:
    """Returns the routes of a model: those every model has, and those all of its engines serve."""
    if not engines:
        return sorted(_GENERATION)
    shared = frozenset.intersection(*(served_by(worker.engine) for worker in engines))
    return sorted(_GENERATION | shared.intersection(passed))


def _model_object(model: Model, name: str, parent: str | None, routes: list[str]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvrouter",
        "root": parent or name,
        "parent": parent,
        "max_model_len": model.max_model_len or None,
        "block_size": model.block_size,
        "workers": model.workers,
        "routes": routes,
    }
