"""A quarantine with metrics."""

from kvrouter.net.decoding import Quarantine
from prometheus_client import CollectorRegistry, Counter, Gauge


def metered_quarantine(registry: CollectorRegistry) -> Quarantine:
    """Returns the quarantine of a process, which counts its rejections in the registry."""
    rejected = Counter(
        "kvrouter_quarantined",
        "Entries of etcd and messages of NATS that were quarantined because they cannot be decoded.",
        ["source", "reason"],
        registry=registry,
    )
    entries = Gauge("kvrouter_quarantined_entries", "Keys and subjects in quarantine.", registry=registry)
    quarantine = Quarantine(lambda source, reason: rejected.labels(source=source, reason=reason).inc())
    entries.set_function(lambda: quarantine.size)
    return quarantine
