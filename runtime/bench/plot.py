"""Plots a run: throughput over time, a timeline of the requests, and the distributions of the
latencies.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atomc.runtime.bench.metrics import LATENCIES, RequestTiming, latencies

if TYPE_CHECKING:  # optional
    from matplotlib.axes import Axes

WAITING, STREAMING, LINE, SOFT = "#d9a441", "#0f7f64", "#1d3f72", "#6b746f"
BINS = 60


def plot(requests: Sequence[RequestTiming], file: Path, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the file's suffix. Raises ImportError without matplotlib, and
    ValueError if no request succeeded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = sorted((each for each in requests if each.error is None), key=lambda each: each.start)
    if not done:
        raise ValueError("no request succeeded, so there is nothing to plot")
    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(3, 4, height_ratios=(1.0, 2.1, 1.6))
    throughput = figure.add_subplot(grid[0, :])
    _plot_throughput(throughput, done)
    _plot_timeline(figure.add_subplot(grid[1, :], sharex=throughput), done)
    values = latencies(done)
    for column, (name, description) in enumerate(LATENCIES.items()):
        _plot_distribution(figure.add_subplot(grid[2, column]), name, description, values[name])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, colors=SOFT)
    figure.savefig(file, dpi=130)


def _plot_throughput(axes: "Axes", done: Sequence[RequestTiming]) -> None:
    """Output tokens per second in each of BINS intervals; a chunk counts with the request's mean
    tokens per chunk.
    """
    first, last = min(each.start for each in done), max(each.end for each in done)
    times = [time for each in done for time in each.times]
    weights = [each.output_tokens / len(each.times) for each in done for _ in each.times]
    tokens, edges = np.histogram(
        times, bins=BINS, range=(first, max(last, first + 1e-9)), weights=weights
    )
    rates = tokens / np.diff(edges)
    axes.stairs(rates, edges, fill=True, color=STREAMING, alpha=0.25)
    axes.stairs(rates, edges, color=STREAMING, linewidth=1.4)
    axes.set_ylabel("output tokens/s", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)


def _plot_timeline(axes: "Axes", done: Sequence[RequestTiming]) -> None:
    """A line for each request, in two colors: before and after its first token."""
    rows = range(len(done))
    width = min(4.0, max(0.6, 260 / len(done)))
    firsts = [each.start + each.ttft for each in done]
    starts, ends = [each.start for each in done], [each.end for each in done]
    for left, right, color, label in (
        (starts, firsts, WAITING, "before the first token"),
        (firsts, ends, STREAMING, "streaming"),
    ):
        axes.hlines(rows, left, right, color=color, linewidth=width, label=label)
    axes.set_ylabel("request", fontsize=9)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylim(len(done) - 0.5, -0.5)
    axes.set_xlim(0, max(ends))
    axes.legend(loc="upper right", fontsize=9, frameon=True, framealpha=0.9)


def _plot_distribution(axes: "Axes", name: str, description: str, seconds: Sequence[float]) -> None:
    """The empirical distribution function of a latency."""
    axes.set_title(f"{name.upper()}: {description.partition(',')[0]}", fontsize=8.5, loc="left")
    if not seconds:
        axes.annotate(
            "one token each", (0.5, 0.5), xycoords="axes fraction", ha="center", color=SOFT, size=9
        )
        axes.set_axis_off()
        return
    milliseconds = 1e3 * np.asarray(seconds)
    axes.ecdf(milliseconds, color=LINE, linewidth=1.6)
    # Labels below the curve: to the right of the median, to the left of p99 and higher.
    for percent, side, height in ((50, "left", 0.04), (99, "right", 0.16)):
        value = float(np.percentile(milliseconds, percent))
        axes.axvline(value, color=SOFT, linewidth=0.8, linestyle=":")
        label = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(f" p{percent} {label} ", (value, height), fontsize=8.5, color=SOFT, ha=side)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ms", fontsize=9)
