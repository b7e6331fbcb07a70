"""Time of a decision with 16 candidates, from bench/core/sequences.py. Prints JSON: median and p99 in µs, by mode."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from sequences import conversations, whole_decisions

CANDIDATES, IN_FLIGHT, BLOCKS = 16, 320, 250
MODES = ("kv", "forecast")


def main() -> None:
    measured = whole_decisions(conversations(IN_FLIGHT, BLOCKS, random.Random(1)), CANDIDATES, BLOCKS)
    print(json.dumps({mode: {"p50_us": measured[mode][1], "p99_us": measured[mode][2]} for mode in MODES}))


if __name__ == "__main__":
    main()
