"""A rule of one's own on potential loads: the worker with the least prefill work has the shortest time to first token.

Usage: minimize_ttft.py TARGET MODEL, such as minimize_ttft.py 127.0.0.1:8001 mock-model
"""

from __future__ import annotations

import sys

from kvrouter.client import SyncClient

PROMPT = range(1, 257)


def main(target: str, model: str) -> None:
    with SyncClient(target, model=model) as client:
        loads = client.get_potential_loads(PROMPT)
        for load in loads:
            print(f"worker {load['worker_id']}: {load['potential_prefill_tokens']} prefill tokens")
        best = min(loads, key=lambda load: load["potential_prefill_tokens"])
        generation = client.generate(PROMPT, worker_id=best["worker_id"], dp_rank=best["dp_rank"])
        tokens = [token for output in generation for token in output.token_ids]
        print(f"chosen {generation.routing.worker_id}: {len(tokens)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
