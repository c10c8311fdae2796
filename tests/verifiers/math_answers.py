"""Answers for tests of the mathematical verifier."""

from shared.ports.verifier import Answer


def said(text: str) -> Answer:
    """An agent's response whose last message is `text`."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return Answer(params={}, response={"output": [message]})


def boxed(answer: str) -> Answer:
    return said(rf"Let me think. The answer is \boxed{{{answer}}}.")
