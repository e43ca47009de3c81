"""What a benchmark found: a table for people, an object for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks.measure import Spread

RATIO, COUNT = "{:.2f}", "{:,.0f}"


@dataclass(frozen=True)
class Row:
    """A figure: the key by which machines find it, what people call it, and its values. `goal`: what it has to
    reach at least (`above`), or at most."""

    key: str
    text: str
    spread: Spread
    form: str = "{:.2f}"
    goal: float | None = None
    better: Literal["above", "below"] = "above"

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        if self.better == "above":
            return self.spread.median >= self.goal
        return self.spread.median <= self.goal


@dataclass(frozen=True)
class Result:
    """One benchmark. `settings`: how it was measured, in words. `interleaved`: rivals took turns in each round."""

    bench: str
    title: str
    rows: list[Row]
    settings: dict[str, str]
    conditions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    interleaved: bool = True

    def to_json(self) -> dict[str, object]:
        """The median of each figure by its key, then all that is known of it under `figures`."""
        return {
            "bench": self.bench,
            **{row.key: round(row.spread.median, 4) for row in self.rows},
            "figures": {
                row.key: {**row.spread.to_json(), "goal": row.goal, "met": row.met}
                for row in self.rows
            },
            "settings": self.settings,
            "conditions": self.conditions,
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_style="bold", title_justify="left", box=None)
        table.add_column("")
        for name in ("median", "min", "max", "goal", ""):
            table.add_column(name, justify="right")
        for row in self.rows:
            spread = row.spread
            sign = ">=" if row.better == "above" else "<="
            table.add_row(
                row.text,
                *(row.form.format(value) for value in (spread.median, spread.low, spread.high)),
                f"{sign} {row.form.format(row.goal)}" if row.goal is not None else "",
                {None: "", True: "met", False: "NOT MET"}[row.met],
            )
        rounds = len(self.rows[0].spread.values)
        how = ", interleaved" if self.interleaved else ""
        facts = {"rounds": f"{rounds}{how}", **self.settings, **self.conditions}
        about = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            about.add_row(Text(name, style="dim"), Text(value, style="dim"))
        console.print(Group(table, Text(), about, *(Text(note) for note in self.notes), Text()))
