"""What all services share: settings, logs, discovery, NATS, gRPC, metrics, start and stop."""

import os

# gRPC's core reads these when it is loaded. Its own log lines are off: they are not structured, and its errors reach
# the caller as exceptions. Processes that start others exec at once, so they need no fork handlers.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
