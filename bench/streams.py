"""Tokens a second and gaps between tokens against the number of streams, of servers beside each
other.

    atomc serve MODEL --port 8101
    vllm serve MODEL --port 8102

    python bench/streams.py --server atomc=http://127.0.0.1:8101 --server vllm=http://127.0.0.1:8102 --json FILE
    python bench/streams.py --json FILE --plot docs/streams.svg

For each number of streams the servers in turn get the same requests of random tokens, all at once:
as many as there are streams, but at least four. Without --server, FILE is plotted.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atomc.runtime.bench import load
from atomc.runtime.bench.client import Server, first_model
from atomc.runtime.bench.datasets import random_requests
from atomc.runtime.bench.metrics import summarize

FEWEST = 4
COLORS = ("#1d3f72", "#d9a441", "#0f7f64", "#8a3324")


async def measured(name: str, url: str, streams: int, arguments: argparse.Namespace) -> Any:
    """The metrics of one server with so many streams."""
    samples = random_requests(
        max(streams, FEWEST), arguments.input_len, arguments.output_len, seed=streams
    )
    server = Server(url, await first_model(url, None), None, {"ignore_eos": True})
    timings = await load.run(server, samples, max_concurrency=streams, progress=False)
    figures = summarize(timings)
    if figures["failed"]:
        raise SystemExit(f"{name} failed requests: {figures['errors']}")
    return {"server": name, "streams": streams, **figures}


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    rates, gaps = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["server"] for row in rows))
    for name, color in zip(names, COLORS, strict=False):
        of_name = sorted((r for r in rows if r["server"] == name), key=lambda r: r["streams"])
        streams = [row["streams"] for row in of_name]
        rates.plot(
            streams, [r["output_tokens_per_second"] for r in of_name], "o-", color=color, label=name
        )
        for percentile, style in (("p50", "o-"), ("p99", "o:")):
            values = [row["itl_ms"][percentile] for row in of_name]
            gaps.plot(streams, values, style, color=color, label=f"{name}, {percentile}")
    titles = ((rates, "output tokens a second"), (gaps, "ms between two tokens of a stream"))
    for axes, title in titles:
        axes.set(xscale="log", yscale="log", xlabel="streams", title=title)
        axes.set_xticks(sorted({row["streams"] for row in rows}), minor=False)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    servers = [server.split("=", 1) for server in arguments.server]
    if servers:
        runs = [(name, url, streams) for streams in arguments.streams for name, url in servers]
        rows = [
            asyncio.run(measured(name, url, streams, arguments))
            for name, url, streams in tqdm(runs, unit="run")
        ]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(arguments.json.read_text())
    for row in rows:
        print(
            f"{row['server']:8} {row['streams']:5} streams  "
            f"{row['output_tokens_per_second']:9,.0f} tokens/s  "
            f"TTFT p50 {row['ttft_ms']['p50']:8.2f}  TPOT {row['tpot_ms']['mean']:7.2f}  ITL p50 "
            f"{row['itl_ms']['p50']:7.2f} p99 {row['itl_ms']['p99']:7.2f} max "
            f"{row['itl_ms']['max']:7.2f} ms"
        )
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
