# SPDX-License-Identifier: Apache-2.0
"""What one can see of a running server: ``/metrics``, ``/ranks`` and the page at ``/``."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from vllm import __version__
from vllm.engine.protocol import EngineClient
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.prometheus import Exposition

PAGE = Path(__file__).with_name("page.html")


def content_security_policy(page: str) -> str:
    """Only the page's own script and style run, it speaks to this server only, and nobody frames it."""

    def inline(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {inline('script')}; style-src {inline('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _causes(places: Sequence[int], waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Who holds up ``places``: those at the ends of the chains, or, where these close to circles, all in them."""
    queue = [other for place in places for other in waits.get(place, ())]
    for rank in queue:
        queue += [other for other in waits.get(rank, ()) if other not in queue]
    return sorted({rank for rank in queue if not waits.get(rank)} or set(queue))


def describe_ranks(engine: EngineClient, model_name: str) -> dict[str, Any]:
    """What the page shows of each DP rank: its last report (see ``stats.rank_stats``) and

    ``state``: ``dead``; ``waiting`` for ``waits_for``, global ranks, its own among them or not; ``running`` requests;
    ``queued`` ones only; ``dummy`` where others have some; ``idle``. ``places``: the global ranks of the DP rank.
    """
    parallel = engine.vllm_config.parallel_config
    tp, reports, waits = parallel.tensor_parallel_size, list(engine.rank_stats), engine.rank_waits
    dead = str(engine.dead_error) if engine.errored else None
    any_work = any(report.get("running", 0) + report.get("waiting", 0) for report in reports)
    ranks = []
    for dp_rank, report in enumerate(reports):
        places = list(range(dp_rank * tp, (dp_rank + 1) * tp))
        waits_for = [] if dead else _causes(places, waits)
        state = "dummy" if any_work else "idle"
        if dead:
            state = "dead"
        elif waits_for:
            state = "waiting"
        elif report.get("running"):
            state = "running"
        elif report.get("waiting"):
            state = "queued"
        ranks.append({**report, "places": places, "waits_for": waits_for, "state": state})
    experts = " · experts over all" if parallel.enable_expert_parallel else ""
    layout = f"TP {tp} · DP {parallel.data_parallel_size}{experts}"
    return {
        "model": model_name,
        "version": __version__,
        "layout": layout,
        "now": time.monotonic(),
        "dead": dead,
        "ranks": ranks,
    }


def watch_router(engine: EngineClient, model_name: str) -> APIRouter:
    """None of these paths asks for an API key, so none tells what requests hold."""
    router, page = APIRouter(), PAGE.read_text()
    metrics = engine.metrics or EngineMetrics()
    config, block_size = engine.vllm_config.model_config, engine.vllm_config.cache_config.block_size

    def snapshot() -> Any:
        reports = list(engine.rank_stats)
        metrics.rank_stats.update((rank, report) for rank, report in enumerate(reports) if report)
        return metrics.snapshot(model_name, range(len(reports)), config.max_model_len, block_size)

    exposition = Exposition(snapshot)
    headers = {
        "Content-Security-Policy": content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    @router.get("/metrics")
    async def show_metrics() -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/ranks")
    async def ranks() -> JSONResponse:
        return JSONResponse(describe_ranks(engine, model_name), headers={"Cache-Control": "no-store"})

    @router.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return router
