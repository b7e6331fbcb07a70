"""What engines require of the distributions that the SDK requires too, as their wheels say it.

``pip install --dry-run --no-deps --report - vllm==0.33.0`` shows it in ``requires_dist``. What they require in turn is
included.
"""

from __future__ import annotations

PINS = {
    # vLLM 0.33.0 with LMCache 0.5.6, whose grpcio-observability pins grpcio, and opentelemetry-proto 1.40.0.
    "vllm-lmcache": (
        "protobuf!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*,>=5.29.6",
        "protobuf<7,>=6.31.1",
        "protobuf<7.0,>=5.0",
        "grpcio==1.78.0",
        "googleapis-common-protos~=1.57",
        "typing-extensions>=4.10",
        "pyzmq>=25.0.0",
    ),
    # SGLang 0.5.23, and smg-grpc-servicer 0.14.1.
    "sglang": (
        "grpcio>=1.81.1",
        "grpcio-reflection>=1.81.1",
        "grpcio-health-checking>=1.81.1",
        "protobuf>=6.33.5",
        "pyzmq>=25.1.2",
    ),
}
"""Requirements by what is installed together."""
