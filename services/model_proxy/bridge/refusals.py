"""The two ways a translation ends without one: the caller's request, or the upstream's reply, has no other form.

How they look on the wire is the exchange's affair: a request error is a 400 in OpenAI's error shape, a
reply error a 502 before the answer began and `response.failed` after it.
"""


class RequestError(Exception):
    """The request cannot be said in the upstream's dialect. `param` names the field, `code` the kind of trouble."""

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class UpstreamReplyError(Exception):
    """A reply that counts as no answer: an error object in it, a form that is not Chat Completions, a cut-off call."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
