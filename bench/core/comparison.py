"""The comparison with Dynamo: its rows, their bars, and the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from measure import Measurements, Runner, median, shown, spread
from rich.console import Console
from rich.table import Table

COMPARED = ("trace16", "trace64", "memory", "hashing", "steady")
"""Parts that are compared."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the comparison."""

    name: str
    measurement: tuple[str, ...]
    figure: str
    ratio: float | None = None
    """Required ratio to Dynamo."""
    most: float | None = None
    """Required upper bound of kvrouter's value."""
    more_is_better: bool = False

    def judged(self, ours: list[Measurements], theirs: list[Measurements]) -> tuple[str, str]:
        """Returns the ratio and whether the bars are met."""
        our, bars, times = median(ours, self.figure), [], ""
        if theirs and self.figure != "wrong":
            their = median(theirs, self.figure)
            ratio = our / their if self.more_is_better else their / our
            times = f"{ratio:.1f}x"
            if self.ratio is not None:
                bars.append(f"{self.ratio:g}x {'met' if ratio >= self.ratio else 'MISSED'}")
        if self.most is not None:
            bars.append(f"<= {shown(self.most)} {'met' if our <= self.most else 'MISSED'}")
        return times, ", ".join(bars)


def lines(part: str, data: Path) -> list[Line]:
    """Returns the rows of a part."""
    if part in ("trace16", "trace64"):
        workers = int(part.removeprefix("trace"))
        ops = data / f"ops_w{workers}.npz"
        if not ops.exists():
            return []
        play: tuple[str, ...] = ("trace.py", str(ops), "--verify")
        name = f"trace, {workers} workers, from empty (the table grows):"
        return [
            Line(f"{name} stored, ns/block", play, "stored ns/block", 8, 15),
            Line(f"{name} removed, ns/block", play, "removed ns/block", 5, 13),
            Line(f"{name} query, us", play, "query us", 15, 1.5),
            Line(f"{name} query p50, us", play, "query p50 us"),
            Line(f"{name} query p99, us", play, "query p99 us"),
            Line(f"{name} wrong answers of 12,031", play, "wrong", most=0),
        ]
    if part == "memory":
        kinds = {
            "one": ("one holder", 36),
            "four": ("four holders, equal engine hashes", 40),
            "private": ("four holders, engine hashes of their own", 100),
        }
        return [
            Line(
                f"resident bytes/block, {name}",
                ("synthetic.py", "memory", kind, "1000000", "512"),
                "bytes/block",
                None,
                bar,
            )
            for kind, (name, bar) in kinds.items()
        ]
    if part == "hashing":
        return [Line("hashing, Mtokens/s", ("synthetic.py", "hashing", "12000"), "Mtokens/s", 10, more_is_better=True)]
    play = ("synthetic.py", "steady", "1000000", "512")
    name = "1 M live, chains of 512,"
    return [
        Line(f"{name} table grown: stored, ns/block", play, "stored ns/block", 8, 15),
        Line(f"{name} table grown: removed, ns/block", play, "removed ns/block", 5, 13),
        Line(f"{name} table grown: query of 512 blocks, us", play, "query us", 15, 1.5),
        Line(f"{name} growing to it: stored, ns/block", play, "growing ns/block"),
        Line(f"{name} growing to it: p99.9 of a batch, us", play, "growth p99.9 us", most=1000),
    ]


def compare(console: Console, runner: Runner, data: Path, parts: list[str]) -> None:
    """Prints the table."""
    table = Table("measurement", "kvrouter", "Dynamo", "ratio", "bar", title=r"median \[least .. most]")
    for line in (line for part in parts for line in lines(part, data)):
        said = runner.both(*line.measurement)
        ours, theirs = said["kvrouter"], said["dynamo"]
        their = spread(theirs, line.figure) if theirs else ""
        table.add_row(line.name, spread(ours, line.figure), their, *line.judged(ours, theirs))
    if table.row_count:
        console.print(table)
