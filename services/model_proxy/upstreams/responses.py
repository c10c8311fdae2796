"""A server that speaks OpenAI's Responses API itself: requests and answers pass through."""

from services.model_proxy.upstream_http import HttpOptions, HttpUpstream


class Options(HttpOptions):
    pass


def create(options: Options) -> HttpUpstream:
    return HttpUpstream(options, dialect="responses", path="/responses")
