"""`paddock demo`: the shipped rows on whatever mesh stands at the address.

The embedded mesh answers them with a scripted model that gets some wrong on purpose: math
`sum-of-the-first-hundred` and weather `umbrella-in-london` end with reward 0.
"""

from datetime import datetime
from importlib.resources import as_file, files
from pathlib import Path

from services.collector.options import EXIT_USAGE, RunOptions, command_name
from services.collector.run import run

DEMO_FILES = ("math.jsonl", "mcqa.jsonl", "gpqa.jsonl", "string_match.jsonl", "weather.jsonl")
_SCRIPTED = "The scripted model gets two of these wrong on purpose, so that both rewards are seen. What next:"
_OWN_MODEL = "These answers are your model's. What next:"
_NEXT = """\
  your model  set PADDOCK_MODEL_BASE_URL, PADDOCK_MODEL_NAME and PADDOCK_MODEL_API_KEY, then {paddock} demo again
  your rows   {paddock} run rows.jsonl --environment math     (one JSON object per line, like the rows in {rows})
  to stay up  {paddock} up, and in another terminal:
              {paddock} run rows.jsonl --environment math --url http://127.0.0.1:8100"""


def run_demo(url: str, token: str | None = None, *, scripted: bool = True) -> int:
    """Run the shipped rows and show their rewards; returns the exit status of the run.

    `scripted` tells whether the model is the one that knows these rows.
    """
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    with as_file(files("services.collector.demo")) as folder:
        options = RunOptions(
            rows=tuple(folder / name for name in DEMO_FILES),
            out=Path("results") / f"demo-{stamp}.jsonl",
            own_services=True,
        )
        status = run(options, url, token)
        if status < EXIT_USAGE:
            print(_SCRIPTED if scripted else _OWN_MODEL)
            print(_NEXT.format(rows=folder, paddock=command_name()))
        return status
