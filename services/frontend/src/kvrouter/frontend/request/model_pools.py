"""The pools that serve a model: their choice, limits and description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import longest_prompt, serves
from kvrouter.v1.common_pb2 import Role, RoutingConstraints, Stage
from kvrouter.v1.errors import BadRequest, NoWorkers, UnknownModel
from kvrouter.v1.frontend_pb2 import Model
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.texts import text_of

CONSTRAINT_FIELD = "sampling_options.structured_output"
"""Field of the contract that constrains an output."""
UNCONSTRAINED = RoutingConstraints()
"""Those of a request that may go to any worker."""


def pools_of_model(
    model: str, components: Mapping[ComponentName, ComponentView], stage: Stage = Stage.STAGE_WHOLE
) -> list[ComponentView]:
    """Returns the components serving a model in a stage, at least one, that with the most live workers first.

    Raises:
        UnknownModel: no component serves the model.
    """
    of_model = [view for view in components.values() if view.model == model]
    serving = [view for view in of_model if serves(view.role, stage)]
    if not serving:
        live = [view.descriptor for view in components.values() if view.workers]
        known = {descriptor.model for descriptor in live if serves(descriptor.role, stage)}
        only = next((text_of(Role, view.role) for view in of_model if view.workers), "")
        raise UnknownModel(model, sorted(known), only)
    return _largest_first(serving)


def of_pool(views: list[ComponentView], pool: str) -> list[ComponentView]:
    """Returns those of a model's components that have a name; all of them for an empty one.

    Raises:
        NoWorkers: there is none.
    """
    found = [view for view in views if not pool or view.name.name == pool]
    if not found:
        raise NoWorkers(f"{views[0].model} has no pool {pool}")
    return found


def _largest_first(views: list[ComponentView]) -> list[ComponentView]:
    if len(views) > 1:
        views.sort(key=lambda view: (len(view.workers), str(view.name)), reverse=True)
    return views


def resolve_model(model: str, components: Mapping[ComponentName, ComponentView]) -> tuple[list[ComponentView], str]:
    """Returns the components serving a model or LoRA adapter, and the adapter's name; empty for a base model.

    There is at least one component. That with the most live workers is the first.

    Raises:
        UnknownModel: no component serves it.
    """
    try:
        return pools_of_model(model, components), ""
    except UnknownModel:
        serving = [
            view
            for view in components.values()
            if serves(view.role) and any(model in worker.lora_names for worker in view.workers.values())
        ]
        if not serving:
            raise
    return _largest_first(serving), model


def fitting_pools(request: GenerateRequest, tokens: int, views: Sequence[ComponentView]) -> Sequence[ComponentView]:
    """Returns the pools that can run a request of that many prompt tokens; all of them if none can.

    A pool can if a worker of it satisfies the request's constraints, and prompt and output keep its limit.
    """
    constraints, lora_name = request.constraints or UNCONSTRAINED, request.lora_name
    is_constrained = request.sampling.structured_output is not None
    longest = tokens + request.stop.max_tokens
    return [
        view
        for view in views
        if longest <= (view.max_model_len or longest)
        and any(
            can_take(worker, constraints, lora_name) and (worker.serves_structured_output or not is_constrained)
            for worker in view.workers.values()
        )
    ] or views


def context_length(tokens: int, views: Sequence[ComponentView]) -> int:
    """Returns the context length of the first pool a prompt of that many tokens fits; 0 if it is not known."""
    lengths = [view.max_model_len for view in views if view.workers]
    return next((each for each in lengths if tokens <= longest_prompt(each)), views[0].max_model_len)


def describe_models(components: Mapping[ComponentName, ComponentView]) -> list[Model]:
    """Returns every model that has live workers, not only for prefill, in order of name.

    A component's descriptor outlives its workers, so its index stays valid. It must not appear as a model then.
    """
    models = [
        Model(
            name=view.model,
            component=view.descriptor.component,
            block_size=view.block_size,
            workers=len(view.workers),
            max_model_len=view.max_model_len or None,
            lora_names=sorted({name for worker in view.workers.values() for name in worker.lora_names}),
        )
        for view in components.values()
        if view.workers and serves(view.role)
    ]
    return sorted(models, key=lambda model: (model.name, model.component.name))


def structured_workers(view: ComponentView, field: str = CONSTRAINT_FIELD) -> list[int]:
    """Returns the workers that constrain outputs.

    Args:
        view: The component.
        field: Field of the request with the constraint, for the error.

    Raises:
        BadRequest: there are none.
    """
    able = [worker.worker_id for worker in view.workers.values() if worker.serves_structured_output]
    if not able and view.workers:
        raise BadRequest(
            f"{field}: no worker of the model {view.model!r} constrains outputs",
            field=field,
            advice=f"Leave {field} out, or use a model whose engines have structured output.",
        )
    return able


def can_take(worker: WorkerRegistration, constraints: RoutingConstraints, lora_name: str) -> bool:
    """Returns whether a worker is eligible, whatever its load. The Scheduler makes the final decision."""
    allowed = constraints.allowed_worker_ids
    return (
        not worker.draining
        and serves(worker.role)
        and worker.worker_id not in constraints.excluded_worker_ids
        and (not allowed or worker.worker_id in allowed)
        and ("worker_id" not in constraints or worker.worker_id == constraints.worker_id)
        and all(worker.labels.get(label) == value for label, value in constraints.required_labels.items())
        and (not lora_name or lora_name in worker.lora_names)
    )
