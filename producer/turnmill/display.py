"""What the command line shows of runs and farms, as rich renderables. Nothing here prints."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnmill.client import FarmStatus
from turnmill.rehearsal import Outlook
from turnmill.results import Caps
from turnmill.run import Progress, RunEnd
from turnmill.store import BenchedWorker

_LONG = {
    "run",
    "worker",
    "host",
    "model",
    "engine",
    "devices",
    "last crash",
    "due later",
    "workers",
}
"""Columns whose cells may be long."""


def progress_line(progress: Progress) -> str:
    """A run in one line, for logs and terminals that cannot be redrawn."""
    outcomes = ", ".join(f"{n} {name}" for name, n in progress.outcomes.items() if n)
    parts = [
        f"{progress.ended}/{progress.total} conversations" + (f" ({outcomes})" if outcomes else ""),
        f"{progress.running} under way",
        f"turns: {progress.asked} answered, {progress.stored} from the store",
    ]
    if progress.tokens:
        parts.append(f"{progress.tokens / max(progress.seconds, 1e-9):.0f} tokens/s")
    if not progress.workers:
        parts.append("no live worker")
    return " · ".join(parts)


class LiveProgress:
    """A run as it goes, for rich.live: drawn anew from the same Progress each time."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name, self._progress = name, progress

    def __rich__(self) -> Table:
        progress = self._progress
        lines = Table.grid()
        lines.add_row(Text(f"run {self._name}", style="bold"))
        lines.add_row(ProgressBar(total=max(progress.total, 1), completed=progress.ended, width=60))
        lines.add_row(Text(progress_line(progress), style="dim"))
        return lines


def report_table(end: RunEnd) -> Table:
    """A finished attempt as a table of two columns."""
    report = end.report
    table = _table_of_two(f"run {report.run}")
    for name, number in report.outcomes.model_dump().items():
        table.add_row(f"conversations {name}", str(number))
    if end.unfinished:
        table.add_row("conversations not ended", str(end.unfinished))
    _add_caps(table, report.capped)
    for kind, number in report.failures.items():
        table.add_row(f"failures: {kind}", str(number))
    for ending, number in report.endings.items():
        table.add_row(f"ended: {ending}", str(number))
    if report.scores:
        table.add_row(f"score, mean of {report.scores.count}", f"{report.scores.mean:.4f}")
    table.add_row("turns asked", str(report.asked))
    table.add_row("turns from the store", str(report.from_store))
    table.add_row("prompt tokens", f"{report.tokens.prompt:,}")
    table.add_row("  of them cached", f"{report.tokens.cached:,}")
    table.add_row("completion tokens", f"{report.tokens.completion:,}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    if end.tokens_made:
        table.add_row("tokens/s", f"{end.tokens_made / max(report.seconds, 1e-9):.1f}")
    for engine in report.engines:
        table.add_row("engine", Text(str(engine)))
    if len(report.engines) > 1:
        table.add_row("", Text("not of one engine", style="bold red"))
    return table


def end_line(end: RunEnd) -> str:
    """A finished attempt in one line."""
    outcomes = end.report.outcomes.model_dump()
    parts = [f"{number} {name}" for name, number in outcomes.items() if number]
    if end.unfinished:
        parts.append(f"{end.unfinished} not ended")
    if end.report.scores:
        parts.append(f"score {end.report.scores.mean:.4f}")
    return f"run {end.report.run} has ended: {', '.join(parts)}"


def suite_table(name: str, ends: Sequence[RunEnd]) -> Table:
    """The runs of a suite, a row each. A column that says nothing of any of them is left out."""
    columns: dict[str, list[str]] = {}
    for end in ends:
        report = end.report
        numbers = {**report.outcomes.model_dump(), "not ended": end.unfinished}
        cells = {column: str(number or "") for column, number in numbers.items()}
        cells["score"] = f"{report.scores.mean:.4f}" if report.scores else ""
        cells |= {"asked": str(report.asked), "stored": str(report.from_store)}
        cells["budget"] = "spent" if end.budget_spent else ""
        for column, cell in cells.items():
            columns.setdefault(column, []).append(cell)
    columns = {column: cells for column, cells in columns.items() if any(cells)}
    table = Table(title=f"suite {name}", title_style="bold", box=None)
    table.add_column("run", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for end, *row in zip(ends, *columns.values(), strict=True):
        table.add_row(Text(end.report.run), *row)
    return table


def outlook_table(outlook: Outlook) -> Table:
    """A dry run as a table of two columns."""
    table = _table_of_two(f"run {outlook.run}, not driven")
    table.add_row("model", Text(outlook.model or "not known yet"))
    for name, number in outlook.conversations.model_dump().items():
        table.add_row(f"conversations {name.replace('_', ' ')}", str(number))
    for name, number in outlook.outcomes.model_dump().items():
        if number:
            table.add_row(f"  complete as {name}", str(number))
    _add_caps(table, outlook.capped)
    for kind, number in outlook.failures.items():
        table.add_row(f"failures: {kind}", str(number))
    table.add_row("turns stored", str(outlook.stored))
    table.add_row("turns asked next", str(outlook.next))
    if outlook.queued:
        table.add_row("  of them in the queue already", str(outlook.queued))
    if outlook.again:
        table.add_row("  of them asked again", str(outlook.again))
    if outlook.effects:
        table.add_row("effects done next", str(outlook.effects))
    return table


def _table_of_two(title: str) -> Table:
    table = Table(title=title, title_style="bold", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    return table


def _add_caps(table: Table, capped: Caps) -> None:
    for name, number in capped.model_dump().items():
        if number:
            kind = "turns" if name == "output" else "conversations"
            table.add_row(f"{kind} capped by {name}", str(number))


def status_tables(status: FarmStatus) -> Group:
    """Queues, runs and workers."""
    queues = _table(
        "model", "queued", "running", "due later", "suspects", "workers", title="queues"
    )
    for model, depth in status.queues.items():
        live = sum(worker.model == model for worker in status.workers)
        workers = str(live) if live or not depth.queued else "none: turns wait"
        queues.add_row(
            model,
            str(depth.queued),
            str(depth.running),
            f"{depth.due} ({depth.newer} for a newer turnmill)" if depth.newer else str(depth.due),
            str(depth.suspects),
            workers,
        )
    runs = _table("run", "turns", "answered", "failed", "cancelled", title="runs")
    for run in status.runs:
        runs.add_row(run.name, str(run.total), str(run.done), str(run.failed), str(run.cancelled))
    live_workers = _table(
        "worker",
        "host",
        "model",
        "engine",
        "slots",
        "running",
        "state",
        "up",
        "seen",
        title="workers",
    )
    now = time.time()
    for worker in status.workers:
        live_workers.add_row(
            worker.id,
            f"{worker.host}:{worker.pid}",
            worker.model,
            f"{worker.engine.engine} {worker.engine.version}",
            str(worker.slots),
            str(worker.running),
            worker.state,
            f"{now - worker.started:.0f} s",
            f"{max(0.0, now - worker.heartbeat):.0f} s ago",
        )
    tables = [queues, runs, live_workers]
    if status.benched:
        tables.append(_benched_table(status.benched, now))
    return Group(*tables)


def _table(*columns: str, title: str) -> Table:
    """In a narrow terminal names are folded, for cut off they cannot be compared; and numbers stay whole."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in _LONG)
    return table


def _benched_table(workers: Sequence[BenchedWorker], now: float) -> Table:
    table = _table(
        "host",
        "model",
        "engine",
        "devices",
        "starts in",
        "last crash",
        title="benched: crashed too often",
    )
    for worker in workers:
        table.add_row(
            f"{worker.host}:{worker.pid}",
            worker.model or "",
            worker.engine,
            worker.devices or "",
            f"{max(0.0, worker.until - now):.0f} s",
            Text(worker.why),  # an engine's own words, which may look like markup
        )
    return table
