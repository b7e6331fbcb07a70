"""What serves a model is looked up once for each change of the registrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.errors import UnknownModel
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration


def components(model: str) -> dict[ComponentName, ComponentView]:
    name = ComponentName("ns", "pool")
    worker = WorkerRegistration(worker_id=1, lora_names=["adapter"])
    return {name: ComponentView(name, ComponentDescriptor(model=model), {1: worker})}


def test_a_change_of_the_registrations_changes_what_serves_a_model() -> None:
    directory = SimpleNamespace(components=components("first"))
    models = ServedModels(cast(Directory, directory), cast(Any, None), None)
    assert models.resolve("first").lora_name == ""
    assert models.resolve("adapter").lora_name == "adapter"
    assert models.resolve("first") == models.resolve("first")
    directory.components = components("second")
    assert models.resolve("second").views[0].descriptor.model == "second"
    assert models.resolve("adapter").views[0].descriptor.model == "second"
    with pytest.raises(UnknownModel):
        models.resolve("first")


def test_requests_that_cannot_be_forwarded_leave_out_pools_that_have_only_an_openai_api() -> None:
    pools = {}
    for number, worker in enumerate(
        [
            WorkerRegistration(endpoint="http://a:1", openai_endpoint="http://a:1"),
            WorkerRegistration(endpoint="b:1", openai_endpoint="http://b:2"),
            WorkerRegistration(endpoint="c:1"),
        ]
    ):
        name = ComponentName("ns", str(number))
        pools[name] = ComponentView(name, ComponentDescriptor(model="m"), {1: worker})
    models = ServedModels(cast(Directory, SimpleNamespace(components=pools)), cast(Any, None), None)
    assert {view.name.name for view in models.pools("m", forwarding=False)} == {"1", "2"}
    assert {view.name.name for view in models.pools("m", forwarding=True)} == {"0", "1"}


def test_unknown_models_are_not_kept() -> None:
    directory = SimpleNamespace(components=components("first"))
    models = ServedModels(cast(Directory, directory), cast(Any, None), None)
    for number in range(3):
        with pytest.raises(UnknownModel):
            models.resolve(f"unknown-{number}")
    assert models.resolve("first").views[0].descriptor.model == "first"
    assert set(models._resolved) == {"first"}


def test_of_two_registrations_at_one_address_the_one_that_was_chosen_serves() -> None:
    """An address is registered twice until the lease of the worker that had it before ends."""
    first, second = ComponentName("ns", "first"), ComponentName("ns", "second")
    address = "10.0.0.7:9000"
    two = [RankRegistration(dp_rank=rank) for rank in range(2)]
    old = WorkerRegistration(worker_id=1, endpoint=address, openai_endpoint="http://old:1")
    new = WorkerRegistration(worker_id=2, endpoint=address, openai_endpoint="http://new:1", ranks=two)
    other = WorkerRegistration(worker_id=3, endpoint=address)
    views = {
        first: ComponentView(first, ComponentDescriptor(model="m"), {1: old, 2: new}),
        second: ComponentView(second, ComponentDescriptor(model="m"), {3: other}),
    }
    directory = SimpleNamespace(components=views)
    models = ServedModels(cast(Directory, directory), cast(Any, None), None)
    assert models.engine_at(address, 1) == (old, "http://old:1", "first", False)
    assert models.engine_at(address, 2) == (new, "http://new:1", "first", True)
    assert models.engine_at(address, 3) == (other, "", "second", False)
    assert models.engine_at(address) is not None
    assert models.engine_at(address, 4) is None
    assert models.engine_at("10.0.0.8:9000") is None
    directory.components = {second: views[second]}
    assert models.engine_at(address, 1) is None
    assert models.engine_at(address) == models.engine_at(address, 3)
