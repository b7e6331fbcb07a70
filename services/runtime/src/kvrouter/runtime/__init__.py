"""The common base of all services: settings, logs, discovery, NATS, gRPC, metrics, start and stop."""

import os

# gRPC's core reads these when it is loaded. Its own log lines are off: they are not structured, and its errors reach
# the caller as exceptions. Processes that start others exec at once, so they need no fork handlers.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# The older I/O of gRPC's clients costs a fifth less CPU and latency for a message on an open stream than its event
# engine, which hands each message to another thread: bench/request.md, "A message between processes".
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
