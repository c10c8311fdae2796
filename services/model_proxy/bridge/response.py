"""A chat completion → a Responses object, and the parts of that which the stream shares."""

from collections.abc import Callable, Mapping
from typing import Any

from services.model_proxy.bridge.calls import CallTable, call_payload
from services.model_proxy.bridge.capabilities import Capabilities, Ending, ending_of
from services.model_proxy.bridge.items import (
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    refusal_part,
    text_logprobs,
    text_part,
    usage_of,
)
from services.model_proxy.bridge.names import NameMap
from services.model_proxy.bridge.refusals import UpstreamReplyError
from services.model_proxy.bridge.think import ThinkSplitter
from services.model_proxy.bridge.tokens import TokenRecord

# What is echoed where nothing was said: the API's own defaults. Its schema demands numbers for sampling, although
# an upstream may have other defaults; who has to know sets them in the model's configuration.
_ECHO: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
# What a function that is echoed has to have, even where it was left out of the request.
_FUNCTION = {"description": None, "parameters": None, "strict": None}


def envelope(request: Mapping[str, Any], model: str, response_id: str, created_at: float) -> dict[str, Any]:
    """A Responses object under way: the request's own parameters as they were sent, and no output yet."""
    echo = {name: default if request.get(name) is None else request[name] for name, default in _ECHO.items()}
    echo["tools"] = [{**_FUNCTION, **tool} if tool["type"] == "function" else tool for tool in echo["tools"]]
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created_at),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": request.get("model") or model,
        "output": [],
        "usage": None,
        **echo,
    }


def concluded(
    response: dict[str, Any], ending: Ending, output: list[dict[str, Any]], usage: dict[str, Any] | None
) -> dict[str, Any]:
    """The Responses object at its end, completed or incomplete."""
    completed = ending == "completed"
    return {
        **response,
        "status": "completed" if completed else "incomplete",
        "incomplete_details": None if completed else {"reason": ending},
        "output": output,
        "usage": usage,
    }


def reply_error(reply: Mapping[str, Any], capabilities: Capabilities) -> UpstreamReplyError | None:
    """The error that a body or chunk with status 200 holds, if it is one; its code is the upstream's own."""
    error = reply.get("error")
    if not error:
        if reply.get("object") != "error":
            return None
        error = reply
    if not isinstance(error, dict):
        return UpstreamReplyError(str(error), "server_error")
    message = str(error.get("message") or "The upstream reported an error without a message.")
    code = error.get("code")
    code = str(code if code is not None else error.get("type") or "server_error")
    if capabilities.overflows(code, message):
        code = "context_length_exceeded"
    return UpstreamReplyError(message, code)


def ending_or_failure(finish_reason: Any, capabilities: Capabilities) -> Ending:
    """What the finish reason means.

    Raises:
        UpstreamReplyError: there is none, or it is no ending of an answer.
    """
    if not finish_reason:
        raise UpstreamReplyError(
            "The upstream's answer ended without a finish reason: it was cut off.", "truncated_stream"
        )
    ending = ending_of(str(finish_reason), capabilities)
    if ending == "failed":
        raise UpstreamReplyError(
            f"The upstream ended its answer with the finish reason {finish_reason!r}. If that is no failure, say"
            " what it means under the model's capabilities: finish_reasons.",
            "upstream_finish_reason",
        )
    return ending


_TEXT_PARTS = frozenset({"text", "output_text"})


def plain_text(content: Any) -> str:
    """The text of a content that may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(plain_text(part["text"]) for part in content if part.get("type") in _TEXT_PARTS)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message or delta: servers name it in two ways, some in both at once."""
    return plain_text(message.get("reasoning_content") or message.get("reasoning"))


def to_responses(
    chat: dict[str, Any],
    *,
    request: Mapping[str, Any],
    names: NameMap,
    capabilities: Capabilities,
    new_id: Callable[[str], str],
    created_at: float,
) -> dict[str, Any]:
    """Translate a whole chat completion.

    Raises:
        UpstreamReplyError: it holds an error, is cut off, or is no chat completion.
    """
    try:
        if failure := reply_error(chat, capabilities):
            raise failure
        choices = chat["choices"]
        choice = next((one for one in choices if one.get("index") == 0), choices[0])
        ending = ending_or_failure(choice.get("finish_reason"), capabilities)
        output = _output(chat, choice, ending != "completed", names, capabilities, new_id)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UpstreamReplyError(
            f"The upstream's answer is not a chat completion: {type(error).__name__}: {error}", "invalid_reply"
        ) from error
    response = envelope(request, str(chat.get("model") or ""), new_id("resp"), created_at)
    return concluded(response, ending, output, usage_of(chat.get("usage")))


def _output(
    chat: dict[str, Any],
    choice: dict[str, Any],
    truncated: bool,
    names: NameMap,
    capabilities: Capabilities,
    new_id: Callable[[str], str],
) -> list[dict[str, Any]]:
    message = choice["message"]
    reasoning, text = _split(reasoning_of(message), plain_text(message.get("content")), capabilities)
    calls = CallTable(names, new_id)
    for entry in message.get("tool_calls") or legacy_calls(message):
        calls.entire(entry)
    output = []
    if reasoning:
        output.append(reasoning_item(new_id("rs"), [reasoning_part(reasoning)], "completed"))
    logprobs = text_logprobs((choice.get("logprobs") or {}).get("content") or [])
    parts = [text_part(text, logprobs)] if text else []
    if message.get("refusal"):
        parts.append(refusal_part(plain_text(message["refusal"])))
    if parts:
        output.append(message_item(new_id("msg"), parts, "completed"))
    named = calls.named()
    if truncated and output and not named:
        output[-1]["status"] = "incomplete"
    for call in named:
        payload, status = call_payload(call, truncated)
        assert call.tool is not None
        output.append(call_item(call.tool, call.item_id, call.call_id, payload, status))
    if not output:
        output.append(message_item(new_id("msg"), [text_part("", [])], "completed"))
    output[-1].update(TokenRecord.of_completion(chat, choice))
    return output


def _split(reasoning: str, text: str, capabilities: Capabilities) -> tuple[str, str]:
    if capabilities.think_tags == "off" or not text:
        return reasoning, text
    splitter = ThinkSplitter(capabilities.think_tags == "opened")
    thought, said = splitter.feed(text)
    late_thought, late = splitter.end()
    return reasoning + thought + late_thought, said + late


def legacy_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The one call of the form before `tool_calls`."""
    call = message.get("function_call")
    return [{"index": 0, "function": call}] if call else []
