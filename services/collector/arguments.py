"""The words of `paddock run` on the command line."""

import argparse
import os
from pathlib import Path

from services.collector.options import RunOptions

_DEFAULTS = RunOptions(rows=())


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rows", nargs="*", type=Path, metavar="ROWS", help="JSONL files with prepared rows; not needed with --resume"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="OUT",
        help="results file; failures, inputs and metrics lie beside it (default: results/<rows>-<time>.jsonl)",
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("PADDOCK_ENVIRONMENT_URL") or None,
        help="environment server to use, or the balancer before its replicas (else PADDOCK_ENVIRONMENT_URL, else, with"
        " --resume, the run's own, else services of its own for this run)",
    )
    parser.add_argument(
        "--environment", metavar="NAME", help="environment of the rows that name none; other names are refused"
    )
    parser.add_argument(
        "--repeats", type=int, default=_DEFAULTS.repeats, metavar="N", help="run every row N times (default: 1)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=_DEFAULTS.concurrency,
        metavar="N",
        help=f"episodes at once (default: {_DEFAULTS.concurrency})",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows that can be read")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in OUT: rows without a result, terminal failure or third failure; episodes that still"
        " run are joined",
    )
    parser.add_argument(
        "--cancel-on-interrupt",
        action="store_true",
        help="Ctrl-C cancels the episodes under way (else they go on in the environment, and --resume joins them)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=_DEFAULTS.patience_s,
        metavar="SECONDS",
        help="how long one row is tried again while the environment, or the way to it, is away"
        f" (default: {_DEFAULTS.patience_s:g})",
    )


def options_of(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(
        rows=tuple(arguments.rows),
        out=arguments.out,
        environment=arguments.environment,
        repeats=arguments.repeats,
        concurrency=arguments.concurrency,
        limit=arguments.limit,
        resume=arguments.resume,
        patience_s=arguments.patience,
        cancel_on_stop=arguments.cancel_on_interrupt,
    )
