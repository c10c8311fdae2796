"""Credentials out of text: what logs, results and error bodies may show.

Taken out is what looks like a credential, and, however it looks, what this process was told to hide.
"""

import re
from typing import Final

import orjson

BLANK: Final = "[credential]"
# A shorter secret would blank out innocent text.
SECRET_MIN_CHARS: Final = 8

# Neither pattern reaches over a quotation mark, so that a redacted line of JSON stays one.
_USER_INFO = re.compile(r"(://)[^/@\s\"]+@")
_CREDENTIAL = re.compile(r"(?i)\b(?:sk-|pdk1\.|bearer\s+)[A-Za-z0-9._~+/-]{6,}=*")

_hidden: set[str] = set()


def hide(secret: str | None) -> None:
    """Blank this text out from now on, in this process; does nothing for None and for text of under 8 characters."""
    if secret is not None and len(secret) >= SECRET_MIN_CHARS:
        # As it is, as Python's own errors quote it, and either within JSON.
        forms = (secret, repr(secret)[1:-1])
        _hidden.update([*forms, *(orjson.dumps(form)[1:-1].decode() for form in forms)])


def redact(text: str) -> str:
    """The text without credentials."""
    for secret in _hidden:
        if secret in text:
            text = text.replace(secret, BLANK)
    if "://" in text:
        text = _USER_INFO.sub(r"\1", text)
    # Most texts hold nothing of the kind, and the pattern costs ten times as much as this look.
    lowered = text.lower()
    if "sk-" in lowered or "pdk1." in lowered or "bearer" in lowered:
        text = _CREDENTIAL.sub(BLANK, text)
    return text
