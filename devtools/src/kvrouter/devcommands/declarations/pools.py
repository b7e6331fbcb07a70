"""The options of ``kvrouter simulate`` and ``kvrouter tune`` for prefill and decode pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.runtime.kv_transfer import KvTransfer

if TYPE_CHECKING:
    from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions

_LINK = KvTransfer()

Prefill = Annotated[
    int | None, typer.Option(min=1, help="Number of prefill engines, of a disaggregated fleet; with --decode.")
]
Decode = Annotated[
    int | None, typer.Option(min=1, help="Number of decode engines, of a disaggregated fleet; with --prefill.")
]
MinTokens = Annotated[
    int | None,
    typer.Option(
        "--remote-prefill-min-tokens",
        min=0,
        help="Least uncached tokens of a prompt that a prefill engine computes; 512 by default.",
    ),
]
PrefillTime = Annotated[
    float | None,
    typer.Option(
        "--prefill-us-per-token",
        min=0,
        help="Time to compute a prompt token, in µs, compared with its transfer; learned from first tokens by default.",
    ),
]
TokenBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-bytes-per-token", min=0, help=f"KV cache of a token, in bytes; {_LINK.bytes_per_token:,} by default."
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--kv-transfer-gb-per-second",
        help=f"Bandwidth of a transfer, 10^9 bytes per second; {_LINK.gigabytes_per_second:g} by default.",
    ),
]
Latency = Annotated[
    float | None,
    typer.Option(
        "--kv-transfer-latency-ms",
        min=0,
        help=f"Time of a transfer besides that of its bytes, in ms; {_LINK.latency_ms:g} by default.",
    ),
]


def remote_prefill_options(
    min_tokens: int | None,
    prefill_us_per_token: float | None,
    bytes_per_token: int | None,
    gigabytes_per_second: float | None,
    latency_ms: float | None,
) -> RemotePrefillOptions:
    """Returns the options of the Scheduler's decision, with its defaults for what is None.

    Raises:
        WrongUsage: the bandwidth is not above 0.
    """
    from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions

    if gigabytes_per_second is not None and not 0 < gigabytes_per_second < float("inf"):
        raise WrongUsage(f"--kv-transfer-gb-per-second is {gigabytes_per_second:g}, must be finite and above 0")
    link = KvTransfer(
        _LINK.bytes_per_token if bytes_per_token is None else bytes_per_token,
        _LINK.gigabytes_per_second if gigabytes_per_second is None else gigabytes_per_second,
        _LINK.latency_ms if latency_ms is None else latency_ms,
    )
    return RemotePrefillOptions(
        RemotePrefillOptions().min_tokens if min_tokens is None else min_tokens,
        prefill_us_per_token,
        link,
    )
