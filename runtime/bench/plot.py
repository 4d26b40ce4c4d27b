"""A picture of a run: every request on a time line, tokens per second above it, and the spread of latencies."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atomc.runtime.bench.figures import LATENCIES, Timed, latencies, percentile

WAITING, STREAMING, LINE, SOFT = "#d9a441", "#0f7f64", "#1d3f72", "#6b746f"
BINS = 60


def plot(requests: Sequence[Timed], file: Path, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the file's ending. Raises ImportError without matplotlib, ValueError for no answers."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs the library `matplotlib`: pip install 'atomc[bench]'") from error
    done = sorted((each for each in requests if each.error is None), key=lambda each: each.start)
    if not done:
        raise ValueError("no request was answered, so there is nothing to plot")
    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    grid = figure.add_gridspec(3, 4, height_ratios=(1.0, 2.1, 1.6))
    speed = figure.add_subplot(grid[0, :])
    lanes = figure.add_subplot(grid[1, :], sharex=speed)
    _speed(speed, done)
    _lanes(lanes, done)
    values = latencies(done)
    for column, (name, meaning) in enumerate(LATENCIES.items()):
        _spread(figure.add_subplot(grid[2, column]), name, meaning, values[name])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, colors=SOFT)
    figure.savefig(file, dpi=130)


def _speed(axes: Any, done: Sequence[Timed]) -> None:
    """Tokens that came in each of BINS parts of the time; a piece of several tokens counts as so many."""
    first, last = min(each.start for each in done), max(each.end for each in done)
    width = max(last - first, 1e-9) / BINS
    made: defaultdict[int, float] = defaultdict(float)
    for each in done:
        for time in each.times:
            made[min(int((time - first) / width), BINS - 1)] += each.output_tokens / len(each.times)
    edges = [first + width * number for number in range(BINS + 1)]
    axes.stairs([made[number] / width for number in range(BINS)], edges, fill=True, color=STREAMING, alpha=0.25)
    axes.stairs([made[number] / width for number in range(BINS)], edges, color=STREAMING, linewidth=1.4)
    axes.set_ylabel("output tokens/s", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)


def _lanes(axes: Any, done: Sequence[Timed]) -> None:
    """A line for each request: until its first token, and from there."""
    rows = range(len(done))
    width = min(4.0, max(0.6, 260 / len(done)))
    firsts = [each.start + each.ttft for each in done]
    axes.hlines(rows, [each.start for each in done], firsts, color=WAITING, linewidth=width, label="until the first token")
    axes.hlines(rows, firsts, [each.end for each in done], color=STREAMING, linewidth=width, label="streaming")
    axes.set_ylabel("request", fontsize=9)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylim(len(done) - 0.5, -0.5)
    axes.set_xlim(0, max(each.end for each in done))
    axes.legend(loc="upper right", fontsize=9, frameon=True, framealpha=0.9)


def _spread(axes: Any, name: str, meaning: str, seconds: Sequence[float]) -> None:
    """The share of requests (of pieces, for ITL) at or below each time."""
    axes.set_title(f"{name.upper()}: {meaning.partition(',')[0]}", fontsize=8.5, loc="left")
    if not seconds:
        axes.text(0.5, 0.5, "one token each", ha="center", va="center", transform=axes.transAxes, color=SOFT, fontsize=9)
        axes.set_axis_off()
        return
    ordered = [1e3 * value for value in sorted(seconds)]
    axes.ecdf(ordered, color=LINE, linewidth=1.6)
    # Below the curve, where it is empty: right of the middle, and left of the end at another height.
    for percent, side, height in ((50, "left", 0.04), (99, "right", 0.16)):
        value = percentile(ordered, percent)
        axes.axvline(value, color=SOFT, linewidth=0.8, linestyle=":")
        label = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        axes.annotate(f" p{percent} {label} ", (value, height), fontsize=8.5, color=SOFT, ha=side)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ms", fontsize=9)
