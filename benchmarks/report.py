"""The tables and the chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.in_dagster.findings import Findings
from benchmarks.results import About, Results
from benchmarks.targets import OURS, RAW, TITLES, Target

COLOURS = {"ours": "#3b5bdb", "raw": "#868e96"}
PEER_COLOURS = ("#f08c00", "#2b8a3e", "#c2255c")
VERDICT_STYLES = {"PASS": "green", "FLOOR": "yellow", "MISS": "bold red", "not measured": "dim"}


def show(results: Results, targets: Sequence[Target], console: Console) -> None:
    for store in TITLES:
        if any(sample.contender == about.name for about in results.of(store) for sample in results.samples):
            console.print(_throughput(results, store))
            for failed in results.failures(store):
                console.print(
                    f"[red]FAILED: {failed.contender}, batch {failed.batch}, {failed.workers} workers, "
                    f"round {failed.round}: {failed.failure}"
                )
    for name, reason in results.unavailable.items():
        console.print(f"[bold red]NOT MEASURED: {name}, {reason}")
    for problem in results.problems:
        console.print(f"[bold red]FAILED: {problem}")
    if results.latency:
        console.print(_latency(results))
    if results.streaming:
        console.print(_streaming(results))
    if results.dagster:
        for table in (_overheads, _drainings, _ticks):
            console.print(table(results.dagster))
    console.print(_targets(results, targets))
    facts = {**results.machine, **results.versions, **(results.dagster.versions if results.dagster else {})}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)


def _throughput(results: Results, store: str) -> Table:
    title = f"{TITLES[store]}: items per second at full durability, median of {results.rounds} rounds"
    table = _table(title, "batch workers", "contender how", "enqueue lease complete cycle vs-raw vs-best-peer")
    for batch, workers in sorted(map(tuple, results.cells)):
        peer = results.best_peer(store, batch, workers)
        for about in results.of(store):
            if (cycle := results.rate(about.name, batch, workers)) is None:
                if not about.many_processes and workers > 1:
                    table.add_row(f"{batch:,}", str(workers), about.name, "not safe in many processes")
                continue
            here = (about.name, batch, workers)
            operations = [
                _rate(results.rate(*here, operation)) if operation != "complete" or about.completes else "free"
                for operation in ("enqueue", "lease", "complete")
            ]
            against_raw = results.ratio(here, (RAW[store], batch, workers))
            against_peer = results.ratio(here, (peer, batch, workers)) if peer else None
            table.add_row(
                f"{batch:,}", str(workers), about.name, about.how(batch), *operations, _rate(cycle),
                _times(against_raw), _times(against_peer), style="bold" if about.role == "ours" else "",
            )  # fmt: skip
        table.add_section()
    table.caption = "; ".join(f"{about.name}: {about.note}" for about in results.of(store))
    return table


def _latency(results: Results) -> Table:
    shallow = results.depths[0]
    first = {(row.contender, row.limit): row.p50_ms for row in results.latency if row.depth == shallow}
    table = _table("Lease latency, milliseconds a call", "pending limit", "contender", "p50 p99 p50-growth")
    for row in sorted(results.latency, key=lambda row: (row.store != "sqlite", row.limit, row.contender, row.depth)):
        growth = row.p50_ms / first[row.contender, row.limit]
        table.add_row(
            f"{row.depth:,}", str(row.limit), row.contender,
            f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", _times(growth),
        )  # fmt: skip
    return table


def _streaming(results: Results) -> Table:
    table = _table("Streaming in, calls of 1,000", "items", "contender", "items/s growth-MiB resident-MiB")
    for row in results.streaming:
        table.add_row(
            f"{row.items:,}", row.contender, _rate(row.items_per_second),
            f"{row.growth_mib:.1f}", f"{row.resident_mib:.0f}",
        )  # fmt: skip
    return table


def _overheads(findings: Findings) -> Table:
    title = "Dagster: a leased asset against a plain one, milliseconds a run"
    table = _table(title, "batch", "", "plain leased ratio more-a-run more-an-item,-us bare-queue")
    for row in findings.overheads:
        plain, leased, bare = (statistics.median(taken) * 1e3 for taken in (row.plain, row.leased, row.bare_queue))
        table.add_row(
            f"{row.batch:,}", f"{plain:.1f}", f"{leased:.1f}", _times(row.ratio),
            f"{row.per_run * 1e3:.1f}", f"{row.per_item * 1e6:,.1f}", f"{bare:.1f}",
        )  # fmt: skip
    table.caption = findings.how["overhead"]
    return table


def _drainings(findings: Findings) -> Table:
    title = "Dagster: items per second, one draining run against a run an item"
    table = _table(title, "", "how", "items drained runs run-an-item ratio")
    for row in findings.drainings:
        table.add_row(
            row.how, f"{row.items:,}", _rate(row.drained_rate), str(row.runs), f"{row.one_by_one_rate:.2f}",
            f"{row.ratio:,.0f}x",
        )  # fmt: skip
    table.caption = "; ".join(f"{row.how}: {findings.how[row.how]}" for row in findings.drainings)
    return table


def _ticks(findings: Findings) -> Table:
    table = _table("Dagster: a tick that is up to date, milliseconds", "events", "sensor", "p50 p99 p50-growth")
    shortest = min(tick.events for tick in findings.ticks)
    for tick in findings.ticks:
        growth = None if tick.events == shortest else findings.tick_growth(tick.sensor)
        table.add_row(f"{tick.events:,}", tick.sensor, f"{tick.p50_ms:.2f}", f"{tick.p99_ms:.2f}", _times(growth))
    table.caption = findings.how["ticks"]
    return table


def _targets(results: Results, targets: Sequence[Target]) -> Table:
    title = "Targets" + (" (quick run: small sizes, trust the full run)" if results.quick else "")
    return targets_table(title, targets)


def targets_table(title: str, targets: Sequence[Target]) -> Table:
    table = _table(title, "", "work needed", "reached verdict")
    for target in targets:
        reached = "" if target.reached is None else f"{target.reached:,.2f}"
        style = VERDICT_STYLES[target.verdict]
        table.add_row(target.work, target.needed, reached, f"[{style}]{target.verdict}")
    return table


def _table(title: str, keys: str, names: str, numbers: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold")
    for columns, justify in ((keys, "right"), (names, "left"), (numbers, "right")):
        for column in columns.split():
            table.add_column(column.replace("-", " "), justify=justify)  # type: ignore[arg-type]
    return table


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def draw(results: Results, path: Path) -> None:
    """Whole cycles per second: by batch with one worker, and by workers in batches of 100."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "omnirelay", "font.size": 9, "axes.axisbelow": True})
    figure, panels = plt.subplots(len(TITLES), 2, figsize=(10, 7), sharey="row", layout="constrained")
    for row, (store, title) in zip(panels, TITLES.items(), strict=True):
        drawn = results.of(store)
        by_batch = [(f"batches of {batch:,}" if batch > 1 else "one a call", batch, 1) for batch in results.batches]
        by_workers = [(f"{n} workers" if n > 1 else "1 worker", 100, n) for n in results.workers]
        for panel, cells, name in ((row[0], by_batch, "1 worker"), (row[1], by_workers, "batches of 100")):
            _bars(panel, results, drawn, cells)
            panel.set_title(f"{title}, {name}", loc="left")
        row[0].set_ylabel("items/s, whole cycle (log scale)")
        row[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle("enqueue + lease + complete at full durability: more is better", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _bars(panel, results: Results, drawn: Sequence[About], cells: Sequence[tuple[str, int, int]]) -> None:  # type: ignore[no-untyped-def]
    width = 0.85 / max(len(drawn), 1)
    peers = [about.name for about in drawn if about.role == "peer"]
    for place, about in enumerate(drawn):
        heights = [results.rate(about.name, batch, workers) or 0.0 for _, batch, workers in cells]
        left = [spot + (place - (len(drawn) - 1) / 2) * width for spot in range(len(cells))]
        colour = COLOURS.get(about.role) or PEER_COLOURS[peers.index(about.name)]
        name = "this queue" if about.name in OURS.values() else about.name
        label = f"{name} ({about.how(100)})" if about.how(100) else name
        bars = panel.bar(left, heights, width * 0.92, color=colour, label=label)
        panel.bar_label(bars, [_short(height) for height in heights], fontsize=7, padding=1)
    panel.set_yscale("log")
    panel.set_ylim(bottom=50)
    panel.margins(y=0.22)
    panel.set_xticks(range(len(cells)), [label for label, _, _ in cells])
    panel.grid(axis="y", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _short(rate: float) -> str:
    if not rate:
        return ""
    return f"{rate / 1000:.0f}k" if rate >= 9_950 else f"{rate / 1000:.1f}k" if rate >= 1_000 else f"{rate:.0f}"
