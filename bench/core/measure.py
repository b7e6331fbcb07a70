"""Runs measurements, each in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
Measurements = dict[str, float]
Rounds = dict[str, list[Measurements]]
"""Results of each round, by engine."""


@dataclass
class Runner:
    """Runs measurements and keeps their results; rows with the same measurement share its rounds."""

    peer: Path | None
    """Python of the environment that Dynamo is installed in."""
    rounds: int
    clock: tuple[str, ...] = ()
    _said: dict[tuple[str, ...], Rounds] = field(default_factory=dict)

    def both(self, *arguments: str) -> Rounds:
        """Runs a measurement for kvrouter and, if available, for Dynamo, alternating."""
        if arguments not in self._said:
            said: Rounds = {"kvrouter": [], "dynamo": []}
            for _ in range(self.rounds):
                said["kvrouter"].append(self._one(Path(sys.executable), "kvrouter", arguments))
                if self.peer is not None:
                    said["dynamo"].append(self._one(self.peer, "dynamo", arguments))
            self._said[arguments] = said
        return self._said[arguments]

    def ours(self, *arguments: str, rounds: int | None = None) -> list[Measurements]:
        """Runs a measurement for kvrouter alone."""
        return [self._one(Path(sys.executable), "kvrouter", arguments) for _ in range(rounds or self.rounds)]

    def _one(self, python: Path, engine: str, arguments: tuple[str, ...]) -> Measurements:
        script, *rest = arguments
        command = [str(python), str(HERE / script), engine, *rest, *self.clock]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        measurements: Measurements = json.loads(done.stdout.splitlines()[-1])
        return measurements


def median(rounds: list[Measurements], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def spread(rounds: list[Measurements], name: str) -> str:
    """Returns a text: median [lowest .. highest]."""
    values = [one[name] for one in rounds]
    return f"{shown(statistics.median(values))} [{shown(min(values))} .. {shown(max(values))}]"
