"""The status page at / and the data it polls from /status."""

import asyncio
import base64
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import HTMLResponse

from atomc.report.render.text import NOT_REWRITES
from atomc.runtime.server.engines.client import EngineDead
from atomc.runtime.server.service.service import Service

PAGE = Path(__file__).with_name("status.html")
# Pages that poll within this time share one response of the engine.
FRESH_SECONDS = 0.4
# Timeout for the engine's response; during a long step the page shows the last stats.
ANSWER_SECONDS = 1.0


def router(service: Service) -> APIRouter:
    """Two routes: the static page, and its data."""
    routes = APIRouter(include_in_schema=False)
    status = StatusFigures(service)
    page = PAGE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": content_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @routes.get("/")
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @routes.get("/status")
    async def figures() -> dict[str, Any]:
        return await status.figures()

    return routes


class StatusFigures:
    """The data of the status page."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engines = service.engines
        self._refreshed = -FRESH_SECONDS
        self._compile_summary: dict[str, Any] | None = None

    async def figures(self) -> dict[str, Any]:
        """Model, stats of all engines and compiler summary. sick: why no engine can serve; age:
        seconds since `stats`.
        """
        engines, metrics = self._engines, self._service.metrics
        await self._refresh()
        now = time.monotonic()
        clients, stats = engines.clients, engines.stats
        infos = [client.info for client in clients]
        return {
            "model": metrics.model,
            "sick": engines.unhealthy_reason,
            "stats": asdict(stats) if stats else None,
            "engines": [
                {
                    "sick": client.unhealthy_reason,
                    "running": client.stats.running if client.stats else 0,
                    "waiting": client.stats.waiting if client.stats else 0,
                }
                for client in clients
            ],
            "age": now - min(client.stats_time for client in engines.alive or clients),
            "uptime": now - self._service.started,
            "restarts": sum(client.restarts for client in clients),
            "errors": metrics.errors(),
            "first_token": ttft_summary(metrics.recent_ttft),
            "class": infos[0].model,
            "device": infos[0].device,
            "max_len": engines.max_len,
            "kv_tokens": sum(info.kv_tokens for info in infos),
            "num_sequences": sum(info.num_sequences for info in infos),
            "phases": infos[0].phases,
            "speeds": sum_of_latest(
                [tokens_per_second_history(client.token_history, now) for client in clients]
            ),
            "compiler": self._compile_summary,
        }

    async def _refresh(self) -> None:
        if time.monotonic() - self._refreshed < FRESH_SECONDS or self._engines.unhealthy_reason:
            return
        self._refreshed = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._engines.update_stats()
                if self._compile_summary is None:
                    self._compile_summary = compile_summary(
                        json.loads(await self._engines.call("report"))
                    )
        except (TimeoutError, EngineDead):
            pass


def ttft_summary(seconds: Collection[float]) -> dict[str, float] | None:
    """Number of requests, and median and 95th percentile of their time to the first token."""
    if not seconds:
        return None
    median, most = np.quantile(list(seconds), (0.5, 0.95))
    return {"requests": len(seconds), "median": float(median), "p95": float(most)}


def tokens_per_second_history(
    token_history: Collection[tuple[float, int]], now: float
) -> list[float]:
    """Tokens generated in each of the last seconds, oldest first. token_history: (time, total)."""
    if not token_history:
        return []
    times, counts = zip(*token_history, strict=True)
    borders = np.arange(-math.ceil(now - times[0]), 1) + now
    return [round(float(speed), 2) for speed in np.diff(np.interp(borders, times, counts))]


def sum_of_latest(histories: Sequence[Sequence[float]]) -> list[float]:
    """The sums of histories that end now."""
    length = max(map(len, histories))
    padded = [[0.0] * (length - len(history)) + [*history] for history in histories]
    return [round(sum(speeds), 2) for speeds in zip(*padded, strict=True)]


def compile_summary(report: dict[str, Any]) -> dict[str, Any]:
    """The parts of the compiler's report for the page: sites per rewrite, kernels per op."""
    runs = Counter((choice["op"], choice["chosen"]) for choice in report["kernels"])
    return {
        "treated": report["treated"],
        "why_not": report["why_not"],
        "layers": len({site["layer"] for site in report["sites"] if site["layer"] is not None}),
        "rewrites": {
            name: sites
            for name, sites in report["matches"].items()
            if sites and name not in NOT_REWRITES
        },
        "kernels": [
            {"op": op, "runs_as": kernel, "nodes": nodes}
            for (op, kernel), nodes in runs.most_common()
        ],
        "near_misses": len(report["near"]),
        "seconds": sum(report["phases"].values()),
        "notes": report["notes"],
    }


def content_policy(page: str) -> str:
    """A Content-Security-Policy that allows the page's own style and script, by hash, and requests
    to this server only.
    """
    style, script = (
        re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")
    )
    assert style is not None and script is not None
    return (
        f"default-src 'none'; style-src {hash_source(style[1])}; "
        f"script-src {hash_source(script[1])}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def hash_source(text: str) -> str:
    """The source of a Content-Security-Policy that allows this style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
