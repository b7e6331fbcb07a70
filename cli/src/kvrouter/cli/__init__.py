"""The ``kvrouter`` command: runs, drives, measures and inspects the services."""

import kvrouter.runtime  # noqa: F401 - sets gRPC's environment before anything else loads gRPC
