"""Episodes on Redis beside the memory store, over one replica and several, and what a takeover costs."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil

from services.launcher.embedded import embedded_mesh
from shared.configuration import load_settings
from shared.settings import SERVICE_NAMES
from tests.balancer import start as balancer
from tests.bench.load import Job
from tests.bench.measuring import ROW, WARM_UP, Measured, measure, services_of_this_process
from tests.environment.parties import native
from tests.environment.replicas import replicas
from tests.mesh.processes import MARK, Running, new_mark, running
from tests.serving import free_port
from tests.store.redis_server import RedisServer

LOADS = ((1, 300), (16, 1500))
REPLICAS = 3
TAKEN_OVER = 50
LEASE_S = 2.0
START_S = 60.0
MESH_TOKEN = "a token of the benchmark"
_RIGHT = '"reward":1.0'


def on_redis(folder: Path, scale: float) -> list[tuple[str, str, str]]:
    """The same episodes with the memory store and on Redis."""
    if not shutil.which("redis-server"):
        return [("episodes on Redis", "left out: there is no redis-server (deploy/engines/redis.sh)", "")]
    memory = _embedded({}, folder / "memory.log", scale)
    with RedisServer(folder) as server:
        redis = _embedded({"PADDOCK_STORE_URL": server.url}, folder / "redis.log", scale)
        several = _replicated(server, folder, scale)
    rows = []
    for at_once, _ in LOADS:
        a, b = redis[at_once], memory[at_once]
        told = f"{_told(a)}; memory: {_told(b)}; + {a.cpu_ms - b.cpu_ms:.2f} ms CPU, + {a.p50_ms - b.p50_ms:.1f} ms p50"
        rows.append(
            (f"episodes on Redis, {at_once} at once", told, "+ ≤ 1 ms CPU, + ≤ 2 ms p50" if at_once == 1 else "")
        )
        if several:
            title = f"episodes on Redis, {REPLICAS} replicas of each behind HAProxy, {at_once} at once"
            rows.append((title, _told(several[at_once]), ""))
    return rows


def takeover(folder: Path, _scale: float) -> list[tuple[str, str, str]]:
    """What another server needs to continue the episodes of one that was killed."""
    if not shutil.which("redis-server"):
        return []
    below = folder / "takeover"
    below.mkdir()
    waited_s, cpu_s = asyncio.run(_taken_over(below))
    told = (
        f"{waited_s:.1f} s after the kill, {LEASE_S:g} s of which the lease; {cpu_s * 1e3 / TAKEN_OVER:.1f} ms CPU each"
    )
    return [(f"{TAKEN_OVER} episodes of a killed server, continued by another", told, "≤ 2 x the lease")]


def _told(measured: Measured) -> str:
    return f"{measured.per_second:.0f}/s, p50 {measured.p50_ms:.1f} ms, {measured.cpu_ms:.2f} ms CPU"


def _embedded(environ: dict[str, str], log: Path, scale: float) -> dict[int, Measured]:
    with embedded_mesh(load_settings([], environ), log_path=log) as mesh:
        return _measured(f"{mesh.environment_url}/run", services_of_this_process(), {}, scale)


def _measured(url: str, watched: list[psutil.Process], headers: dict[str, str], scale: float) -> dict[int, Measured]:
    measure(Job(url, ROW, headers, WARM_UP, 8, _RIGHT), watched)
    return {n: measure(Job(url, ROW, headers, int(count * scale), n, _RIGHT), watched) for n, count in LOADS}


def _replicated(server: RedisServer, folder: Path, scale: float) -> dict[int, Measured] | None:
    if not shutil.which("haproxy"):
        return None
    names: tuple[str, ...] = SERVICE_NAMES
    ports = {name: [free_port() for _ in range(REPLICAS)] for name in names}
    addresses = {name: [f"http://127.0.0.1:{port}" for port in found] for name, found in ports.items()}
    with balancer(addresses) as before, contextlib.ExitStack() as stack:
        peers = {f"PADDOCK_{name.upper()}_URL": before.url(name) for name in SERVICE_NAMES}
        environ = {**peers, "PADDOCK_STORE_URL": server.url, "PADDOCK_MESH_TOKEN": MESH_TOKEN, MARK: new_mark()}
        started = [stack.enter_context(one) for one in _each(ports, folder, environ)]
        for name, urls in addresses.items():
            before.wait_until_ready(name, urls, START_S)
        watched = [psutil.Process(one.pid) for one in started]
        return _measured(f"{before.url('environment')}/run", watched, {}, scale)


def _each(
    ports: dict[str, list[int]], folder: Path, environ: dict[str, str]
) -> Iterator[contextlib.AbstractContextManager[Running]]:
    for name, found in ports.items():
        for port in found:
            service = name.replace("_", "-")
            yield running("serve", service, "--port", port, cwd=folder, environ=environ, name=f"{name}-{port}")


async def _taken_over(folder: Path) -> tuple[float, float]:
    """Seconds from the kill to the last continued episode, and the successor's CPU seconds."""
    async with replicas(folder, lease_s=LEASE_S) as started:
        first, second = started.all
        gate = started.parties.hold("run")
        rows = [native(f"r{n}") for n in range(TAKEN_OVER)]
        await asyncio.gather(*(first.run(row, Prefer="respond-async, wait=0") for row in rows))
        await started.parties.event("run", TAKEN_OVER).wait()
        successor = psutil.Process(second.process.pid)
        before_s = sum(successor.cpu_times()[:2])
        killed_at = time.monotonic()
        first.kill()
        await started.parties.event("run", 2 * TAKEN_OVER).wait()
        waited_s = time.monotonic() - killed_at
        cpu_s = sum(successor.cpu_times()[:2]) - before_s
        gate.set()
        outcomes = await asyncio.gather(*(second.outcome(f"r{n}") for n in range(TAKEN_OVER)))
        assert all(outcome["result"]["reward"] == 1.0 for outcome in outcomes), orjson.dumps(outcomes[0])
        return waited_s, cpu_s
