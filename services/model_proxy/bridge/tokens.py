"""Token ids and log-probabilities of an answer, where the upstream gives them (training needs them exactly).

They stand in the message, or as `prompt_token_ids` beside the choices and `token_ids` in the choice (vLLM's
`return_token_ids`), the log-probabilities then with the choice. A part of a set, or lengths that differ, is
an error: what is missing is never guessed.
"""

from collections.abc import Mapping
from typing import Any

from services.model_proxy.bridge.refusals import UpstreamReplyError

PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
_SET = (PROMPT, GENERATION, LOGPROBS)


class TokenRecord:
    """Gathers the sets of a stream, chunk by chunk."""

    __slots__ = ("_generation", "_logprobs", "_prompt")

    def __init__(self) -> None:
        self._prompt: list[int] | None = None
        self._generation: list[int] | None = None
        self._logprobs: list[float] = []

    def take(self, chunk: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        prompt, generation = chunk.get(PROMPT), choice.get("token_ids")
        if prompt is not None:
            self._prompt = prompt
        if generation is not None:
            self._generation = (self._generation or []) + generation
        logprobs = choice.get("logprobs")
        if logprobs:
            self._logprobs += [token["logprob"] for token in logprobs.get("content") or ()]

    def fields(self) -> dict[str, Any]:
        """What the last output item carries; nothing when the upstream gave no ids.

        Raises:
            UpstreamReplyError: a part of the set is missing, or lengths differ.
        """
        if self._prompt is None and self._generation is None:
            return {}
        if not self._prompt or self._generation is None:
            missing = GENERATION if self._prompt else PROMPT
            raise UpstreamReplyError(f"The upstream's token ids are a part of a set: no {missing}.", "token_mismatch")
        fields: dict[str, Any] = {PROMPT: self._prompt, GENERATION: self._generation}
        if self._logprobs:
            if len(self._logprobs) != len(self._generation):
                raise UpstreamReplyError(
                    f"The upstream gave {len(self._generation)} generated token ids but {len(self._logprobs)}"
                    " log-probabilities.",
                    "token_mismatch",
                )
            fields[LOGPROBS] = self._logprobs
        return fields

    @classmethod
    def of_completion(cls, chat: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a whole answer.

        Raises:
            UpstreamReplyError: as `fields`.
        """
        record = cls()
        message = choice["message"]
        given = [name for name in _SET if message.get(name) is not None]
        if not given:
            record.take(chat, choice)
            return record.fields()
        if len(given) < len(_SET):
            raise UpstreamReplyError(
                f"The upstream's token ids are a part of a set: only {', '.join(given)}.", "token_mismatch"
            )
        record._prompt, record._generation, record._logprobs = (message[name] for name in _SET)
        return record.fields()
