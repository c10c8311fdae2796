"""The command `paddock selfcheck`: progress while it runs, then a table of what was not ok and of the slowest."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from shared.errors import PaddockError
from shared.sandbox.selfcheck.rig import Check
from shared.sandbox.selfcheck.run import CHECKS, Outcome, Subject, open_rig, run_checks

SLOWEST: Final = 5


def selfcheck(subject: Subject, *, repeat: int = 1, only: str = "", console: Console | None = None) -> int:
    """Run the checks whose name has `only` in it, `repeat` times; 1 when some failed or the provider cannot work."""
    screen = console or Console(soft_wrap=True, highlight=False)
    chosen = [check for check in CHECKS if only in check.name]
    if not chosen:
        screen.print(f"No check has '{only}' in its name.")
        return 1
    outcomes: list[Outcome] = []
    for number in range(1, repeat + 1):
        if repeat > 1:
            screen.print(f"run {number} of {repeat}", style="bold")
        try:
            outcomes += asyncio.run(_run(subject, chosen, screen))
        except PaddockError as error:
            screen.print(f"The provider '{subject.provider}' cannot work here: {error.message}", markup=False)
            return 1
    screen.print(_table(outcomes))
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    failed = verdicts["FAILED"]
    screen.print(f"{verdicts['ok']} kept, {verdicts['not offered']} not offered, {failed} failed")
    return 1 if failed else 0


async def _run(subject: Subject, chosen: Sequence[Check], screen: Console) -> list[Outcome]:
    def tell(outcome: Outcome) -> None:
        screen.print(f"{outcome.verdict:<12}{outcome.seconds:6.2f} s  {outcome.name}", markup=False)
        if outcome.verdict == "FAILED":
            screen.print(f"{'':21}{outcome.told}", markup=False, style="red")

    async with open_rig(subject) as rig:
        return await run_checks(rig, tell, chosen)


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Each check that failed or is not offered with its reason, and those that took longest."""
    table = Table("check", "verdict", "runs", "longest", "told")
    by_name: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_name[outcome.name].append(outcome)
    longest = {name: max(one.seconds for one in runs) for name, runs in by_name.items()}
    slow = set(sorted(longest, key=lambda name: longest[name])[-SLOWEST:])
    for name, runs in by_name.items():
        worst = min(runs, key=lambda one: ("FAILED", "not offered", "ok").index(one.verdict))
        if worst.verdict != "ok" or name in slow:
            table.add_row(name, worst.verdict, str(len(runs)), f"{longest[name]:.2f} s", worst.told)
    return table
