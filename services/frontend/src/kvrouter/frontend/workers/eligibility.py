"""Decides from constraints and registrations which workers are eligible for a request."""

from __future__ import annotations

from kvrouter.v1.common_pb2 import Role, RoutingConstraints
from kvrouter.v1.registry_pb2 import WorkerRegistration


def can_take(worker: WorkerRegistration, constraints: RoutingConstraints, lora_name: str) -> bool:
    """Returns whether a worker is eligible, whatever its load. The Scheduler makes the final decision."""
    allowed = constraints.allowed_worker_ids
    return (
        not worker.draining
        and worker.role != Role.ROLE_PREFILL
        and worker.worker_id not in constraints.excluded_worker_ids
        and (not allowed or worker.worker_id in allowed)
        and (not constraints.HasField("worker_id") or worker.worker_id == constraints.worker_id)
        and all(worker.labels.get(label) == value for label, value in constraints.required_labels.items())
        and (not lora_name or lora_name in worker.lora_names)
    )
