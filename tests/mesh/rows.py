"""Prepared rows of the tests' own, in the shapes in which data sets come, and files of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": ""}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def asking(text: str) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}}


def math(marker: str, expected: str, **fields: Any) -> dict[str, Any]:
    question = f"{marker}: reckon, and put the result inside \\boxed{{}}."
    return {**asking(question), "question": question, "expected_answer": expected, **fields}


def choice(marker: str, expected: str, *texts: str, **fields: Any) -> dict[str, Any]:
    options = [{letter: text} for letter, text in zip("ABCDEFGHIJ", texts, strict=False)]
    question = f"{marker}: which one is it?"
    return {**asking(question), "options": options, "expected_answer": expected, "uuid": f"uuid-{marker}", **fields}


def match(marker: str, expected: str, mode: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": f"{marker}: say it."}]
    params = {"input": [{"role": "user", "type": "message", "content": parts}]}
    fields = {"expected_answer": expected, "extraction_mode": mode, "case_sensitive": False}
    return {"responses_create_params": params, **fields}


def weather(marker: str) -> dict[str, Any]:
    talk = [{"role": "developer", "content": "You help."}, {"role": "user", "content": f"{marker}: need a coat?"}]
    return {"responses_create_params": {"input": talk, "tools": [WEATHER_TOOL]}}


def write(path: Path, rows: Iterable[dict[str, Any] | str]) -> Path:
    """A JSONL file; a string is written as the line it is."""
    lines = [row.encode() if isinstance(row, str) else orjson.dumps(row) for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]
