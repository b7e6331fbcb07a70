"""The answers of clients' routing calls have what Schedulers and Indexers say."""

from __future__ import annotations

from kvrouter.frontend.edge.grpc_output import overlaps_of, selection_of
from kvrouter.v1.common_pb2 import Component, Cursor, PrefillDecision, Rank, Role
from kvrouter.v1.frontend_pb2 import RankOverlap, Selection
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

CHOICE = SelectWorkerResponse(
    rank=Rank(worker_id=3, dp_rank=1),
    endpoint="host:1",
    overlap_blocks=4,
    prompt_blocks=5,
    decision_id=6,
    load_only=True,
    repeated=True,
    component=Component(namespace="n", name="c"),
    mode="kv",
    role=Role.ROLE_DECODE,
    queued_us=7,
    prefill_tokens=8,
    ignored_overrides=["router_temperature"],
    prefill=PrefillDecision(remote=True, reason="it is long"),
)


def test_a_selection_has_every_field_of_the_choice() -> None:
    selection = selection_of(CHOICE)
    assert len(selection.ListFields()) == len(Selection.DESCRIPTOR.fields)
    for field, value in selection.ListFields():
        assert value == getattr(CHOICE, field.name), field.name


def test_what_a_choice_lacks_stays_unset() -> None:
    selection = selection_of(SelectWorkerResponse(rank=Rank(worker_id=3)))
    assert not selection.HasField("prefill_tokens")
    assert not selection.HasField("prefill")
    assert not selection.HasField("component")


def test_columns_become_one_overlap_for_each_rank() -> None:
    columns = FindMatchesResponse(
        worker_ids=[1, 2],
        dp_ranks=[0, 3],
        device_blocks=[4, 0],
        host_blocks=[5, 1],
        disk_blocks=[6, 2],
        shared_blocks=[7, 3],
        incarnations=[8, 9],
        next_event_ids=[10, 11],
        partial=[False, True],
        prompt_blocks=12,
    )
    answer = overlaps_of(columns)
    assert answer.prompt_blocks == 12
    first, second = answer.overlaps
    assert first == RankOverlap(
        rank=Rank(worker_id=1),
        device_blocks=4,
        host_blocks=5,
        disk_blocks=6,
        shared_blocks=7,
        cursor=Cursor(incarnation=8, next_event_id=10),
    )
    assert (second.rank.dp_rank, second.device_blocks, second.partial) == (3, 0, True)
