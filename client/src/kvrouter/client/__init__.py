"""The Python client of kvrouter."""

import importlib
from typing import Any

from kvrouter.client.client import Client
from kvrouter.client.errors import ClientClosed, NotConnected, WrongEventLoop
from kvrouter.client.options import (
    Constraints,
    GenerateOptions,
    OutputOptions,
    RequestOptions,
    RouterConfigOverride,
    RoutingOptions,
    SamplingOptions,
    StopConditions,
)
from kvrouter.client.results import BestWorker, FinishReason, Generation, Model, Output, PotentialLoad, Routing
from kvrouter.client.sync_client import SyncClient, SyncGeneration
from kvrouter.v1.errors import (
    AllBusy,
    BadRequest,
    BlockSizeMismatch,
    DeadlineExceeded,
    DependencyAway,
    Draining,
    KvRouterError,
    NotFound,
    NotReady,
    NoWorkers,
    Overloaded,
    PermissionDenied,
    PoisonPrompt,
    PromptTooLong,
    RateLimited,
    RequestIdReused,
    ServiceRefused,
    SessionLost,
    TooLarge,
    TooMuchUnread,
    Unauthenticated,
    UnknownModel,
    UnknownWorker,
    WorkerLost,
)


def __getattr__(name: str) -> Any:
    if name != "Router":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("kvrouter.router").Router
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Router routes in this process and needs {error.name}: pip install 'kvrouter-client[router]'"
        ) from None


__all__ = [
    "AllBusy",
    "BadRequest",
    "BestWorker",
    "BlockSizeMismatch",
    "Client",
    "ClientClosed",
    "Constraints",
    "DeadlineExceeded",
    "DependencyAway",
    "Draining",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "KvRouterError",
    "Model",
    "NoWorkers",
    "NotConnected",
    "NotFound",
    "NotReady",
    "Output",
    "OutputOptions",
    "Overloaded",
    "PermissionDenied",
    "PoisonPrompt",
    "PotentialLoad",
    "PromptTooLong",
    "RateLimited",
    "RequestIdReused",
    "RequestOptions",
    "RouterConfigOverride",
    "Routing",
    "RoutingOptions",
    "SamplingOptions",
    "ServiceRefused",
    "SessionLost",
    "StopConditions",
    "SyncClient",
    "SyncGeneration",
    "TooLarge",
    "TooMuchUnread",
    "Unauthenticated",
    "UnknownModel",
    "UnknownWorker",
    "WorkerLost",
    "WrongEventLoop",
]
