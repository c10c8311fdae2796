"""Content parts of input messages and tool outputs, in Chat form.

Text becomes one string where it can: chat templates that cannot read lists of parts are common.
"""

from typing import Any

from services.model_proxy.bridge.refusals import RequestError

_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def type_of(value: Any) -> str:
    """The `type` of an item, part, tool or choice; empty when it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def text_of(content: Any, at: str, joint: str = "") -> str:
    """The text of a content that may hold nothing else.

    Raises:
        RequestError: it does hold something else.
    """
    if isinstance(content, str):
        return content
    return joint.join(_text(part, f"{at}[{index}]") for index, part in enumerate(_parts(content, at)))


def chat_content(content: Any, at: str) -> str | list[dict[str, Any]]:
    """Content that may hold text, images, files and sound: a string, or parts when it is not all text.

    Raises:
        RequestError: a part has no Chat form.
    """
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{at}[{index}]") for index, part in enumerate(_parts(content, at))]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _parts(content: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise RequestError(f"'{at}' must be a string or a list of content parts.", at, "invalid_value")
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise RequestError(f"'{at}[{index}]' must be a content part.", f"{at}[{index}]", "invalid_value")
    return content


def _text(part: dict[str, Any], at: str) -> str:
    kind = type_of(part)
    text = part.get("refusal" if kind == "refusal" else "text")
    if isinstance(text, str) and (kind in _TEXT_TYPES or kind == "refusal"):
        return text
    raise RequestError(f"'{at}': only text can stand here in Chat Completions, not {kind!r}.", at, "unsupported_value")


def _part(part: dict[str, Any], at: str) -> dict[str, Any]:
    kind = type_of(part)
    if kind == "input_image":
        return _image(part, at)
    if kind == "input_file":
        return _file(part, at)
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    return {"type": "text", "text": _text(part, at)}


def _image(part: dict[str, Any], at: str) -> dict[str, Any]:
    url = part.get("image_url")
    if not isinstance(url, str):
        raise RequestError(
            f"'{at}' has no image_url: an uploaded file has no Chat form, so send the image as a URL or data URL.",
            f"{at}.image_url",
            "unsupported_value",
        )
    image = {"url": url}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _file(part: dict[str, Any], at: str) -> dict[str, Any]:
    file = {name: part[name] for name in ("file_data", "file_id", "filename") if part.get(name) is not None}
    if not file.keys() & {"file_data", "file_id"}:
        raise RequestError(
            f"'{at}' has neither file_data nor file_id: a file's URL has no Chat form, so send its data.",
            at,
            "unsupported_value",
        )
    return {"type": "file", "file": file}
