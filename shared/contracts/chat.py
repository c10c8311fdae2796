"""Names of the Chat Completions API that the mesh depends on (OpenAI's API reference, `POST /v1/chat/completions`)."""

# What a strict server knows; anything else in a body is a 400 there (case of NIM-like servers).
REQUEST_FIELDS = frozenset(
    {
        "messages", "model", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "max_tokens",
        "max_completion_tokens", "stop", "seed", "n", "stream", "stream_options", "response_format",
        "reasoning_effort", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "logit_bias",
        "user",
    }
)  # fmt: skip
