"""The CLI before the model proxy before a scripted model: a real process and real sockets."""

import base64
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.contracts.capture import Capture, ModelCall, summed_usage
from shared.tokens import SessionClaims, Signer
from tests.codex.chat import ScriptedChat
from tests.codex.cli import Printed, Provider, Task, run_codex
from tests.model_proxy.wire import Handler, proxy_of, raw_upstream, settings_of

KEY = "episode-1"
UNKNOWN_MODEL = "paddock-model"
"""A name that the CLI has no settings for, as those of served models are."""
FREEFORM_MODEL = "gpt-5.5"
"""A name for which the CLI offers raw text tools, tool search and parallel calls."""
CODE_MODE_MODEL = "gpt-5.6-sol"
"""A name for which the CLI declares its tools among the input, and has scripts call them."""
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
_MESH_TOKEN = "mesh-token-of-these-tests"
_TOKEN_S = 600


@dataclass(frozen=True, slots=True)
class Run:
    """One run from three sides: what the CLI printed, what the model was asked, what the proxy recorded."""

    printed: Printed
    asked: list[dict[str, Any]]
    capture: Capture
    work: Path
    unexpected: list[str]
    left: int

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        return self.capture.calls

    def completed(self, *, recovered: bool = False) -> "Run":
        """Check what holds for every run that ends well; `recovered`: the CLI had to ask again, or told an error."""
        assert self.printed.exit_code == 0, self.printed
        assert (self.unexpected, self.left) == ([], 0), self.printed
        if not recovered:
            self._without_trouble()
        return self

    def _without_trouble(self) -> None:
        assert (self.printed.errors, self.printed.stderr) == ([], ""), self.printed
        assert [call.status for call in self.calls] == [200] * len(self.asked)
        assert [call.error_category for call in self.calls] == [None] * len(self.asked)
        used = summed_usage(self.capture)
        assert used is not None
        assert used.input_tokens_details is not None
        assert used.output_tokens_details is not None
        told = self.printed.usage
        assert (told["input_tokens"], told["output_tokens"]) == (used.input_tokens, used.output_tokens)
        assert told["cached_input_tokens"] == used.input_tokens_details.cached_tokens
        assert told["reasoning_output_tokens"] == used.output_tokens_details.reasoning_tokens

    def failed(self) -> "Run":
        """Check what holds for every run that the CLI gives up."""
        assert (self.printed.exit_code, self.printed.stderr) == (1, ""), self.printed
        assert (self.unexpected, self.left) == ([], 0), self.printed
        assert self.printed.errors[-1] == self.printed.failure
        return self


class Rig:
    """Runs one version of the CLI in a folder of its own."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.work = folder / "work"
        self.work.mkdir()
        self._home = folder / "home"

    async def run(
        self,
        *answers: Handler,
        task: Task | None = None,
        model: str = UNKNOWN_MODEL,
        retries: bool = False,
        idle_ms: int | None = None,
        heartbeat_s: float = 15.0,
    ) -> Run:
        """`retries` leaves the CLI's own number of retries; `idle_ms` is how long it bears silence."""
        chat = ScriptedChat(answers)
        claims = SessionClaims(key=KEY, model="policy", expires_at=time.time() + _TOKEN_S, profile="codex")
        token = Signer(_MESH_TOKEN, "session-token").session_token(claims)
        async with raw_upstream(chat) as upstream:
            served = {"upstream": "chat_completions", "base_url": upstream.url, "model": model}
            settings = settings_of({**served, "heartbeat_s": heartbeat_s}, security={"mesh_token": _MESH_TOKEN})
            async with proxy_of(settings) as proxy:
                provider = Provider(f"{proxy.url}/v1", token, model, None if retries else 0, idle_ms)
                printed = await run_codex(self.version, provider, task or Task(), home=self._home, work=self.work)
                proxy.http.headers["Authorization"] = f"Bearer {_MESH_TOKEN}"
                capture = await proxy.capture(KEY)
        return Run(printed, chat.bodies, capture, self.work, chat.unexpected, chat.left)
