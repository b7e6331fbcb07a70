"""What every service stands on: settings, logs, discovery, NATS, gRPC, metrics, start and stop."""

import os

# gRPC's core reads these when it is loaded. It would write lines of its own form among the log's; what it says there
# reaches the caller as an error as well. And processes that start others exec at once: they need no fork handlers.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
