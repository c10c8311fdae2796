"""Any server that speaks OpenAI's Chat Completions, for example vLLM, SGLang or NIM."""

from services.model_proxy.upstream_http import HttpOptions, HttpUpstream


class Options(HttpOptions):
    pass


def create(options: Options) -> HttpUpstream:
    return HttpUpstream(options, dialect="chat_completions", path="/chat/completions")
