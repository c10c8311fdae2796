"""The other process of the check that attaches by a descriptor: reads a question on stdin, writes a file's content."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson

from shared.contracts.sandbox import SandboxAccess
from shared.sandbox.context import ProviderContext
from shared.sandbox.open import PROVIDERS


async def answer(question: dict[str, Any]) -> bytes:
    module = PROVIDERS.module(question["provider"])
    context = ProviderContext(
        question["provider"], Path(question["state_dir"]), Path(question["socket"]), "http://127.0.0.1:8300"
    )
    provider = module.create(module.Options.model_validate(question["options"]), context)
    try:
        box = await provider.attach(SandboxAccess.model_validate(question["access"]).connection)
        content: bytes = await box.download(question["path"])
        await box.detach()
        return content
    finally:
        await provider.close()


if __name__ == "__main__":
    sys.stdout.buffer.write(asyncio.run(answer(orjson.loads(sys.stdin.buffer.read()))))
