"""What an upstream can do (`Capabilities`, per model) and what a client sends without meaning it (`Profile`).

Both are data: a new server or harness is a new value here or in the configuration, not a new branch.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Ending = Literal["completed", "max_output_tokens", "content_filter", "failed"]
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Capabilities(_Closed):
    """The defaults fit vLLM and other servers that speak OpenAI's Chat Completions."""

    developer_role: bool = False
    """The upstream takes the `developer` role and system messages anywhere; else all become one system message."""
    max_tokens_field: MaxTokensField = "max_tokens"
    """The upstream's name of the output limit."""
    reasoning_effort: bool = False
    """The upstream takes `reasoning_effort`."""
    reasoning_field: Literal["reasoning", "reasoning_content", "think_tags", "none"] = "reasoning"
    """How earlier reasoning is replayed: a field of the assistant message, tags in its text, or not at all."""
    think_tags: Literal["leading", "opened", "off"] = "leading"
    """How think tags in the answer's text are read: a block at the start, a block that the prompt has opened, not."""
    parallel_tool_calls: bool = True
    """The upstream takes `parallel_tool_calls`."""
    top_k: bool = False
    """The upstream takes `top_k`, which callers of the Messages API may send."""
    stream_usage: bool = True
    """The upstream takes `stream_options.include_usage`."""
    tool_images: Literal["user_message", "tool_message"] = "user_message"
    """Where images of a tool's output go: a user message after the outputs, or the tool message itself."""
    chat_template_kwargs: bool = False
    """Requests may set chat template arguments with `metadata.chat_template_kwargs` (JSON)."""
    finish_reasons: dict[str, Ending] = {}
    """Finish reasons of this upstream beside the known ones, and what they mean."""
    context_overflow_codes: tuple[str, ...] = ("context_length_exceeded",)
    """Error codes that say that the prompt does not fit the model's context."""
    context_overflow_phrases: tuple[str, ...] = ("maximum context length", "context window", "context length exceeded")
    """Likewise, parts of an error's message (in lower case), for servers whose code does not say it."""

    def overflows(self, code: str | None, message: str) -> bool:
        """Whether an upstream's error says that the prompt does not fit the model's context."""
        lowered = message.lower()
        return code in self.context_overflow_codes or any(part in lowered for part in self.context_overflow_phrases)


KNOWN_FINISH_REASONS: dict[str, Ending] = {
    "stop": "completed",
    "tool_calls": "completed",
    "function_call": "completed",
    "eos": "completed",
    "eos_token": "completed",
    "stop_sequence": "completed",
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


def ending_of(finish_reason: str, capabilities: Capabilities) -> Ending:
    """What a finish reason means; one that nobody knows is a failure, never a completed answer."""
    configured = capabilities.finish_reasons.get(finish_reason)
    return configured or KNOWN_FINISH_REASONS.get(finish_reason, "failed")


class Profile(_Closed):
    """What may be left out of a request without asking. Everything else without a Chat form is refused."""

    name: str
    drops_fields: frozenset[str] = frozenset()
    """Request fields; a dot leads into `text` and `reasoning`."""
    drops_tools: frozenset[str] = frozenset()
    """Types of tools."""
    drops_items: frozenset[str] = frozenset()
    """Types of input items."""
    drops_messages_fields: frozenset[str] = frozenset()
    """Fields of Messages requests; a dot leads into them."""


_USUAL_FIELDS = frozenset(
    {
        "client_metadata", "include", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "reasoning.effort", "reasoning.generate_summary", "reasoning.summary", "safety_identifier",
        "service_tier", "store", "stream_options", "text.verbosity", "input.reasoning.encrypted_content",
    }
)  # fmt: skip
_USUAL_MESSAGES_FIELDS = frozenset(
    {
        "context_management", "diagnostics", "messages.redacted_thinking", "metadata", "output_config.effort",
        "service_tier", "speed", "thinking", "tool_choice.disable_parallel_tool_use", "tools.eager_input_streaming",
        "tools.input_examples",
    }
)  # fmt: skip

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(name="strict"),
        Profile(name="openai", drops_fields=_USUAL_FIELDS, drops_messages_fields=_USUAL_MESSAGES_FIELDS),
        Profile(
            name="codex",
            drops_fields=_USUAL_FIELDS | {"reasoning.context"},
            drops_tools=frozenset(
                {"code_interpreter", "file_search", "image_generation", "web_search", "web_search_preview"}
            ),
            drops_items=frozenset({"image_generation_call", "web_search_call"}),
            drops_messages_fields=_USUAL_MESSAGES_FIELDS,
        ),
    )
}
