"""Finds a model's component, its tokenizer and the API of its workers, and the pools that can serve one request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.engines.openai_server import is_openai_server
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.rules import check_model
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.packed_prompt import TOKEN_BYTES, hash_prompt
from kvrouter.frontend.request.attempt_input import set_routing
from kvrouter.frontend.request.current_choice import chosen_pool
from kvrouter.frontend.request.model_pools import UNCONSTRAINED, can_take, of_pool, resolve_model
from kvrouter.frontend.request.prefill_stage import PrefillStage
from kvrouter.frontend.schedulers.link_pool import PoolChoice
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.errors import NoWorkers, UnknownModel
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration


class Serving(NamedTuple):
    """The components serving a model or LoRA adapter."""

    views: list[ComponentView]
    """All of them, at least one, the largest first."""
    lora_name: str
    """Name of the adapter; empty for a base model."""
    forwarding: list[ComponentView]
    """Those whose workers all have an OpenAI API, the largest first."""


class Engine(NamedTuple):
    """A registered worker as forwarded requests need it: reading a field of its registration takes a microsecond."""

    worker: WorkerRegistration
    url: str
    """URL of its OpenAI API; empty if it has none."""
    component: str
    """Name of its component."""
    has_ranks: bool
    """Whether it has several data-parallel ranks."""


class ServedModels:
    """The registered models and LoRA adapters, as far as the caller may use them."""

    def __init__(self, directory: Directory, texts: TextModels, access: Access | None) -> None:
        self.texts = texts
        """Tokenizers and chat templates."""
        self._directory = directory
        self._access = access
        self._derived_from: Mapping[ComponentName, ComponentView] = {}
        """The registrations from which the following was derived."""
        self._resolved: dict[str, Serving] = {}
        self._engines: dict[tuple[str, int | None], Engine] | None = None
        """The workers by address and id, and the first one of each address by None; None until they are needed."""
        self._forwarding: set[ComponentName] = set()
        self._only_forwarding: set[ComponentName] = set()

    def resolve(self, model: str) -> Serving:
        """Returns the components serving a model or LoRA adapter, or the one chosen with the model.

        Raises:
            UnknownModel: no component serves it.
            NoWorkers: the chosen component does not exist.
        """
        if self._access is not None:
            # Texts are prepared, and requests forwarded, by their model before they are checked as a whole.
            self._access.enforce(lambda caller: check_model(caller, model), "")
        try:
            return self._serving(model)
        except UnknownModel as error:
            if self._access is None:
                raise
            known = filter(self._access.caller().may_use, error.info.known_values)
            raise UnknownModel(model, known, error.only) from None

    def may_use(self, model: str) -> bool:
        """Returns whether the caller may use a model or adapter, served or not."""
        return self._access is None or self._access.caller().may_use(model)

    @property
    def may_forward(self) -> bool:
        """Whether all workers of some model have an OpenAI API of their own."""
        if self._directory.components is not self._derived_from:
            self._follow_registrations()
        return bool(self._forwarding)

    def pools(self, model: str, *, forwarding: bool) -> Sequence[ComponentView]:
        """Returns the components of a model or adapter requests can be sent to; all if they can to none.

        Args:
            model: Name of the model or adapter.
            forwarding: Whether requests are forwarded to the OpenAI API of workers, or sent to their Generate.

        Raises:
            UnknownModel: no component serves it (any more).
        """
        serving = self._serving(model)
        if forwarding:
            return serving.forwarding or serving.views
        return [view for view in serving.views if view.name not in self._only_forwarding] or serving.views

    def engines(self, model: str) -> Sequence[WorkerRegistration]:
        """Returns the workers of a model's components that requests are forwarded to; none if they go elsewhere.

        Permissions are not checked.
        """
        if not self.may_forward:
            return []
        views = [view for view in self._derived_from.values() if view.model == model]
        return [each for view in views if view.name in self._forwarding for each in view.workers.values()]

    def engine_at(self, endpoint: str, worker_id: int | None = None) -> Engine | None:
        """Returns the registered worker with an address and an id; None if there is none.

        A worker that restarts at an address, or gets that of another one, is registered beside the former one until
        that one's lease ends. If ``worker_id`` is None, it is any of them.
        """
        if self._directory.components is not self._derived_from:
            self._follow_registrations()
        if self._engines is None:
            self._engines = {}
            for view in self._derived_from.values():
                for each in view.workers.values():
                    engine = Engine(each, each.openai_endpoint, view.name.name, len(each.ranks) > 1)
                    self._engines[each.endpoint, each.worker_id] = engine
                    self._engines.setdefault((each.endpoint, None), engine)
        return self._engines.get((endpoint, worker_id))

    def has_text(self, model: str) -> bool:
        """Returns whether the output of a model or LoRA adapter is returned as text."""
        return self.texts.any_loaded and self.texts.find(self.resolve(model).views[0].model) is not None

    def text_of(self, model: str, field: str) -> ModelText:
        """Returns the tokenizer and template of a model or adapter.

        Args:
            model: Name of the model or adapter.
            field: Field of the request needing them, for the error.

        Raises:
            UnknownModel: no component serves the model.
            NoWorkers: the model has no live worker, so nothing is known of its tokenizer.
            BadRequest: the model has no tokenizer here.
        """
        view = self.resolve(model).views[0]
        if not view.workers and self.texts.find(view.model) is None:
            raise NoWorkers(f"{view.name} has no live worker")
        return self.texts.get(view.model, field)

    def _serving(self, model: str) -> Serving:
        """Returns the same as ``resolve``, whoever the caller is."""
        if self._directory.components is not self._derived_from:
            self._follow_registrations()
        serving = self._resolved.get(model)
        if serving is None:
            views, lora_name = resolve_model(model, self._derived_from)
            # Only what is served is kept, so that clients cannot make it grow.
            serving = self._resolved[model] = Serving(views, lora_name, self._forwarding_of(views))
        if pool := chosen_pool():
            views = of_pool(serving.views, pool)
            return Serving(views, serving.lora_name, self._forwarding_of(views))
        return serving

    def _forwarding_of(self, views: Sequence[ComponentView]) -> list[ComponentView]:
        return [view for view in views if view.name in self._forwarding]

    def _follow_registrations(self) -> None:
        """Renews everything derived from the registrations, which have changed."""
        components = self._derived_from = self._directory.components
        self._resolved = {}
        self._engines = None
        self._forwarding = {
            name
            for name, view in components.items()
            if view.workers and all(worker.openai_endpoint for worker in view.workers.values())
        }
        self._only_forwarding = {
            name for name in self._forwarding if all(map(is_openai_server, components[name].workers.values()))
        }


@dataclass(slots=True, eq=False)
class RequestPools:
    """Several pools, which may come and go while the request runs."""

    request: GenerateRequest
    """The request, without token ids."""
    views: Callable[[], Sequence[ComponentView]]
    """Returns the pools serving its model now, at least one, the largest first."""
    choice: PoolChoice
    """Compares pools."""
    health: WorkerHealth
    prefill_stage: Callable[[ComponentView], PrefillStage | None]
    """Returns the request's prefill stage in a pool; None where it has none."""
    is_estimated: bool = False
    """Whether the length of its prompt is an estimate."""

    def largest(self) -> ComponentView:
        """Returns the largest pool that can run the request, or that serves its model if none can. Asks nobody."""
        return self.views()[0]

    def others(self, refused: Collection[ComponentName]) -> bool:
        """Returns whether there is a pool besides those that refused the request."""
        return any(view.name not in refused for view in self.views())

    def has_healthy_worker(self, besides: ComponentName) -> bool:
        """Returns whether a healthy worker of another pool could take the request."""
        constraints, lora_name = self.request.constraints or UNCONSTRAINED, self.request.lora_name
        return any(
            can_take(worker, constraints, lora_name)
            for view in self.views()
            if view.name != besides
            for worker in self.health.healthy(view.name)
        )

    async def cheapest(
        self,
        prompt: bytes,
        deadline: Deadline,
        *,
        refused: Collection[ComponentName] = (),
        current: RoutingRequest | None = None,
    ) -> ComponentView:
        """Returns the pool in which the request costs least.

        Args:
            prompt: Prompt of the next attempt, a packed buffer.
            deadline: Deadline of the request.
            refused: Pools that have refused it; they are left out unless all have.
            current: The request as the pool of the last attempt would receive it; None before the first attempt.
        """
        views = self.views()
        left = [view for view in views if view.name not in refused] or views
        hashes: dict[int, bytes] = {}

        def routing(view: ComponentView) -> RoutingRequest:
            routed = RoutingRequest()
            if current is not None and current.component == view.descriptor.component:
                routed.CopyFrom(current)
            else:
                size = view.block_size
                if size not in hashes:
                    hashes[size] = hash_prompt(prompt, self.request, size)
                tokens = len(prompt) // TOKEN_BYTES
                set_routing(routed, self.request, view, hashes[size], tokens, is_estimated=self.is_estimated)
                routed.constraints.avoided_workers.extend(self.health.avoided(view.name))
            stage = self.prefill_stage(view)
            routed.may_prefill_locally = stage is not None and stage.is_possible
            return routed

        return (await self.choice.cheapest_first(left, routing, deadline))[0]
