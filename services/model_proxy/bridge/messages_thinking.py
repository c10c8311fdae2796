"""Reasoning items of the Responses API ↔ thinking blocks of the Messages API.

What a block has no field for (the item's id, its encrypted content) travels in its opaque string, the
signature, which callers replay unchanged. A signature of another server opens nothing here.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import orjson

_KEPT = ("id", "encrypted_content")
BETWEEN_SUMMARIES = "\n\n"


def thinking_text(item: dict[str, Any]) -> str:
    """The reasoning itself where the item has it, else its summary."""
    text = "".join(part["text"] for part in item.get("content") or ())
    return text or BETWEEN_SUMMARIES.join(part["text"] for part in item.get("summary") or ())


def signature_of(item: dict[str, Any]) -> str:
    kept = {name: item[name] for name in _KEPT if item.get(name)}
    return urlsafe_b64encode(orjson.dumps(kept)).decode()


def reasoning_item_of(text: str, signature: Any) -> dict[str, Any]:
    """The item that a thinking block was; without a signature of ours, one that holds only the text."""
    kept = opened(signature) or {}
    item: dict[str, Any] = {"type": "reasoning", "summary": [], **kept}
    if "encrypted_content" in kept:
        # Servers that encrypt their reasoning take nothing but its summary beside.
        item["summary"] = [{"type": "summary_text", "text": text}]
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    return item


def opened(signature: Any) -> dict[str, str] | None:
    """What a signature of ours keeps; null for any other."""
    if not isinstance(signature, str):
        return None
    try:
        kept = orjson.loads(urlsafe_b64decode(signature.encode()))
    except ValueError:
        return None
    if not isinstance(kept, dict) or not all(name in _KEPT and isinstance(kept[name], str) for name in kept):
        return None
    return kept
