"""No part of a service opens a port or a channel that cannot be encrypted."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN = frozenset({"insecure_channel", "add_insecure_port"})
MAKERS = frozenset(
    {
        "open_channel",
        "remote_on_connections",
        "CallStreamClient",
        "call_stream_client",
        "GrpcServer",
        "RpcServer",
        "LoopServer",
    }
)
"""What takes the TLS of the process."""
EXEMPT = {
    # They choose between the two.
    "net/src/kvrouter/net/tls/channel.py",
    "net/src/kvrouter/net/tls/tls.py",
    "net/src/kvrouter/net/etcd/connection.py",
}


def test_every_port_and_every_channel_of_a_service_takes_tls() -> None:
    found = []
    for path in sorted([*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("net/src/**/*.py")]):
        name = str(path.relative_to(ROOT))
        if name in EXEMPT or "/mocker/" in name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = {keyword.arg for keyword in node.keywords}
            takes_tls = "tls" in named or len(node.args) >= 3
            if called in PLAIN or (called in MAKERS and not takes_tls):
                found.append(f"{name}:{node.lineno}: {called}")
    assert not found, "pass the TLS of the process:\n" + "\n".join(found)
