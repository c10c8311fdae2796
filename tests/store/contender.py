"""A process of its own that competes for a claim: `python -m tests.store.contender URL MODE OWNER FOLDER`.

`count`: adds one to a number in a file, many times, and nothing but the claim keeps two processes from losing steps.
`wait`: stands in line until it is killed.
"""

import asyncio
import sys
from pathlib import Path

from shared.store.redis import RedisStore

ROUNDS = 100


async def _count(store: RedisStore, owner: str, folder: Path) -> None:
    number, fences = folder / "number", folder / "fences"
    for _ in range(ROUNDS):
        lease = await store.acquire("count", owner, ttl_s=10, wait_s=60)
        assert lease is not None
        read = int(number.read_text())
        await asyncio.sleep(0.001)
        number.write_text(str(read + 1))
        with fences.open("a") as out:
            out.write(f"{lease.fence} {owner}\n")
        await store.release(lease)


async def _wait(store: RedisStore, owner: str, folder: Path) -> None:
    waiting = asyncio.create_task(store.acquire("line", owner, ttl_s=60, wait_s=60))
    while not waiting.done():
        (folder / "waits").write_text(owner)
        await asyncio.sleep(0.05)


async def _main(url: str, mode: str, owner: str, folder: str) -> None:
    store = RedisStore(url)
    await (_count if mode == "count" else _wait)(store, owner, Path(folder))
    await store.close()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
