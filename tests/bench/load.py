"""A load generator in a process of its own: `python -m tests.bench.load`, a job as JSON on standard input.

Prints one JSON line: seconds in all, latencies (ms) of each request, and for streams the time to the first
event. Loopback only; the number of requests bounds it.
"""

import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop

from shared.settings import is_loopback


@dataclass(frozen=True, slots=True)
class Job:
    """`expect` must stand in every answer; `stream` reads the body piece by piece."""

    url: str
    body: dict[str, Any]
    headers: dict[str, str]
    requests: int
    at_once: int
    expect: str
    stream: bool = False

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))


async def run(job: Job) -> dict[str, Any]:
    if not is_loopback(urlsplit(job.url).hostname or ""):
        raise SystemExit("The load generator sends to loopback addresses only.")
    body, expect = orjson.dumps(job.body), job.expect.encode()
    latencies: list[float] = []
    firsts: list[float] = []
    todo = iter(range(job.requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker() -> None:
            for _ in todo:
                began = time.perf_counter()
                async with session.post(job.url, data=body, headers=job.headers) as reply:
                    answer = await reply.content.readany() if job.stream else b""
                    if job.stream:
                        firsts.append(time.perf_counter() - began)
                    answer += await reply.content.read()
                    if reply.status != 200 or expect not in answer:
                        raise SystemExit(f"unexpected answer {reply.status}: {answer[:300]!r}")
                latencies.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(job.at_once)))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "latencies": [round(t * 1e3, 4) for t in latencies], "firsts": firsts}


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(uvloop.run(run(Job(**orjson.loads(sys.stdin.buffer.read()))))) + b"\n")
