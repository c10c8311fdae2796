"""`make bench`: our figures beside the bare limit, real processes on loopback, one run.

Ratios and CPU per request can be compared between machines; absolute times cannot.
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from services.launcher.embedded import EmbeddedMesh, embedded_mesh
from shared.clients.model_proxy import model_base_url
from shared.configuration import load_settings
from shared.http.service import mesh_token_of
from tests.bench.load import Job
from tests.bench.measuring import ROW, WARM_UP, measure, program, services_of_this_process
from tests.bench.stores import on_redis, takeover

EPISODES = ((1, 400), (16, 2000), (64, 4000))
CALLS = ((1, 1500), (32, 6000))
# As large as a coding harness's first request: instructions and forty tools.
_WORDS = "Reads a file and returns its text, line by line, with numbers. " * 16
_PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "where"}}}
_FUNCTIONS = [{"name": f"tool_{n}", "description": _WORDS, "parameters": _PARAMETERS} for n in range(40)]
LARGE_QUESTION = {"tools": [{"type": "function", **function} for function in _FUNCTIONS]}
LARGE_CHAT = {"tools": [{"type": "function", "function": function} for function in _FUNCTIONS]}
QUESTION = {"model": "policy", "input": "What is the capital of France?"}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def start_up(folder: Path, _scale: float) -> list[tuple[str, str, str]]:
    """Time to ready, processes and memory of the embedded mesh."""
    began = time.monotonic()
    with embedded_mesh(load_settings([], {}), log_path=folder / "start.log"):
        ready_s = time.monotonic() - began
        mesh = services_of_this_process()
        rss = sum(process.memory_info().rss for process in mesh) / 2**20
        pss = sum(process.memory_full_info().pss for process in mesh) / 2**20
        processes = len(mesh)
    return [
        ("command → ready", f"{ready_s:.2f} s", "≤ 2 s"),
        ("processes", str(processes), "≤ 6"),
        ("RSS", f"{rss:.0f} MB", "≤ 450 MB"),
        ("PSS", f"{pss:.0f} MB", "≤ 200 MB"),
    ]


def episodes(folder: Path, scale: float) -> list[tuple[str, str, str]]:
    """Episodes without a tool call, beside seven bare hops under the same load."""
    rows = []
    with embedded_mesh(load_settings([], {}), log_path=folder / "episodes.log") as mesh:
        url, watched = f"{mesh.environment_url}/run", services_of_this_process()
        measure(Job(url, ROW, {}, WARM_UP, 8, '"reward":1.0'), watched)
        ours = {n: measure(Job(url, ROW, {}, int(count * scale), n, '"reward":1.0'), watched) for n, count in EPISODES}
    with program("leaf") as (leaf_url, leaf), program("hops", f"{leaf_url}/") as (hops_url, hops):
        bare_url, watched = f"{hops_url}/run", [leaf, hops]
        measure(Job(bare_url, ROW, {}, WARM_UP, 8, "Paris"), watched)
        bare = {n: measure(Job(bare_url, ROW, {}, int(count * scale), n, "Paris"), watched) for n, count in EPISODES}
    goals = {1: "p50 ≤ 6 ms", 16: "", 64: "≥ 500/s, ≤ 3 ms CPU"}
    for n, _ in EPISODES:
        a, b = ours[n], bare[n]
        told = f"{a.per_second:.0f}/s, p50 {a.p50_ms:.1f} ms, p95 {a.p95_ms:.1f} ms, {a.cpu_ms:.2f} ms CPU"
        limit = f"(7 bare hops: {b.per_second:.0f}/s, {b.cpu_ms:.2f} ms CPU; ours is {a.cpu_ms / b.cpu_ms:.1f} x)"
        rows.append((f"episodes, {n} at once", f"{told} {limit}", goals[n]))
    return rows


def bridge(folder: Path, scale: float) -> list[tuple[str, str, str]]:
    """The model proxy beside its upstream called directly, and beside one bare hop."""
    rows = []
    with program("upstream") as (upstream_url, _), program("passer", upstream_url) as (passer_url, passer):
        environ = {"PADDOCK_MODEL_BASE_URL": f"{upstream_url}/v1", "PADDOCK_MODEL_NAME": "m"}
        with embedded_mesh(load_settings([], environ), log_path=folder / "bridge.log") as mesh:
            for large, stream in ((False, False), (False, True), (True, True)):
                for n, count in CALLS:
                    load = _Load(stream, large, n, int(count * scale))
                    rows.append(_bridge_row(mesh, upstream_url, (passer_url, passer), load))
    return rows


@dataclass(frozen=True, slots=True)
class _Load:
    """What the bridge is asked: streams or not, a large body or not, `at_once` at a time, `count` in all."""

    stream: bool
    large: bool
    at_once: int
    count: int

    @property
    def title(self) -> str:
        return f"{'SSE' if self.stream else 'JSON'}{', 47 kB body' if self.large else ''}, {self.at_once} at once"


def _bridge_row(
    mesh: EmbeddedMesh, upstream_url: str, passer: tuple[str, psutil.Process], load: _Load
) -> tuple[str, str, str]:
    settings, stream, n, count = mesh.loaded.settings, load.stream, load.at_once, load.count
    headers = {"Authorization": f"Bearer {mesh_token_of(settings)}", "Content-Type": "application/json"}
    ours_url = (
        model_base_url(settings.services.url_of("model_proxy"), f"bench-{n}-{stream}-{load.large}") + "/responses"
    )
    more: dict[str, Any] = {"stream": True} if stream else {}
    question = QUESTION | more | (LARGE_QUESTION if load.large else {})
    chat = CHAT | more | (LARGE_CHAT if load.large else {})
    chat_expect = "DONE" if stream else "Paris"
    ours = Job(ours_url, question, headers, count, n, "response.completed" if stream else "Paris", stream)
    direct = Job(f"{upstream_url}/v1/chat/completions", chat, {}, count, n, chat_expect, stream)
    bare = replace(direct, url=f"{passer[0]}/v1/chat/completions")
    for job in (direct, bare, ours):
        measure(replace(job, requests=min(WARM_UP, count)), [])
    a, b = measure(ours, [_listening_on(settings.services.model_proxy.port)]), measure(direct, [])
    c = measure(bare, [passer[1]])
    told = f"{a.per_second:.0f}/s, {a.cpu_ms:.2f} ms CPU; 1/{b.per_second / a.per_second:.1f} of the upstream directly"
    told += f" ({b.per_second:.0f}/s); bare hop {c.per_second:.0f}/s, {c.cpu_ms:.2f} ms CPU"
    if a.first_p50_ms is not None and b.first_p50_ms is not None:
        told += f"; first event + {a.first_p50_ms - b.first_p50_ms:.2f} ms"
    goal = ("≥ 1/3" if n == 1 else "≥ 1/5") + (", ≤ 2 ms" if stream and n == 1 else "")
    return f"bridge, {load.title}", told, goal


def _listening_on(port: int) -> psutil.Process:
    """The process among ours that serves the port."""
    for process in services_of_this_process():
        serves = any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections("tcp"))
        if serves and not process.children():
            return process
    raise SystemExit(f"nobody of ours listens on {port}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests (default: 1)")
    scale = parser.parse_args().scale
    console = Console(width=180)
    title = f"Paddock beside the bare limit, {psutil.cpu_count()} cores, upstream on uvicorn"
    table = Table("what", "measured", "goal", title=title)
    with TemporaryDirectory(prefix="paddock-bench-") as name:
        folder = Path(name)
        for measured in (start_up, episodes, on_redis, takeover, bridge):
            console.print(f"measuring: {(measured.__doc__ or '').rstrip('.')} …")
            for row in measured(folder, scale):
                table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
