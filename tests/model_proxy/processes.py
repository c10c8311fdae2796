"""Model proxies as processes of their own, which can be signalled like those of a mesh."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.model_proxy.wire import Proxy, proxy_at
from tests.serving import free_port

START_S = 60.0
STOP_S = 30.0


@contextlib.asynccontextmanager
async def proxy_process(folder: Path, **configuration: Any) -> AsyncIterator[tuple[Proxy, asyncio.subprocess.Process]]:
    """`paddock serve model-proxy`, ready; killed at the end if it still runs."""
    port = free_port()
    config = folder / f"proxy-{port}.yaml"
    # Every JSON text is YAML, too.
    config.write_bytes(orjson.dumps(configuration))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    command = ("serve", "model-proxy", "--port", str(port), "--config", str(config))
    with (folder / f"proxy-{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", *command, env=environ, stdout=log, stderr=log
        )
    try:
        async with proxy_at(f"http://127.0.0.1:{port}") as proxy:
            await _ready(proxy, process)
            yield proxy, process
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(STOP_S):
            await process.wait()


async def _ready(proxy: Proxy, process: asyncio.subprocess.Process) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.returncode is None:
        with contextlib.suppress(httpx.TransportError):
            if (await proxy.http.get("/readyz")).status_code == 200:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{proxy.url} did not become ready")
