"""What a run's rollouts say in sum. Pure: no files, no clock.

Masked and failed rollouts are gaps in coverage, never scores. Fractions are fractions, not percents.
Rules per score, decided over all tasks at once and named in the answer:

- `combinatorial`: every score is 0 or 1, so pass@k is the unbiased 1 - C(n-c, k) / C(n, k) of a task
  with n rollouts of which c passed.
- `max_of_first_k`: pass@k is the best of the first k rollouts by repeat index.

A task with fewer than k rollouts is left out of every figure at k; `tasks_at_k` says how many were in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import comb, fsum, sqrt
from statistics import median
from typing import Any, Final

from services.collector.student import t_quantile_975

COMBINATORIAL: Final = "combinatorial"
MAX_OF_FIRST_K: Final = "max_of_first_k"
REWARD: Final = "reward"

_Scores = Mapping[int, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """How one row and repeat stands: graded, masked, failed, or without an outcome yet."""

    environment: str
    task_index: int
    repeat_index: int
    reward: float | None = None
    masked: bool = False
    components: Mapping[str, float] | None = None
    has_answer: bool = False
    """Whether the verifier says which answer it extracted."""
    answer: str | None = None
    usage: Mapping[str, float] | None = None
    failure_kind: str | None = None

    @property
    def graded(self) -> bool:
        return self.reward is not None and not self.masked


def run_metrics(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """Coverage, scores, usage and failures per environment."""
    by_environment: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_environment[rollout.environment].append(rollout)
    return {name: environment_metrics(group) for name, group in sorted(by_environment.items())}


def environment_metrics(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    ordered = sorted(rollouts, key=lambda rollout: (rollout.task_index, rollout.repeat_index))
    graded = [rollout for rollout in ordered if rollout.graded]
    names = sorted({name for rollout in graded for name in rollout.components or {}})
    scores = {REWARD: score_metrics(graded, None)} if graded else {}
    return {
        "coverage": _coverage(ordered),
        "scores": scores | {f"reward_components.{name}": score_metrics(graded, name) for name in names},
        "tasks": [
            {"task_index": task} | spread([value for rollout in group if (value := rollout.reward) is not None])
            for task, group in groupby(graded, key=lambda rollout: rollout.task_index)
        ],
        "usage": usage_averages(ordered),
        "failures": dict(Counter(rollout.failure_kind for rollout in ordered if rollout.failure_kind).most_common()),
    }


def _coverage(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    graded = sum(rollout.graded for rollout in rollouts)
    masked = sum(rollout.masked for rollout in rollouts)
    failed = sum(rollout.failure_kind is not None for rollout in rollouts)
    return {
        "rows": len(rollouts),
        "graded": graded,
        "masked": masked,
        "failed": failed,
        "without_outcome": len(rollouts) - graded - masked - failed,
        "coverage": graded / len(rollouts) if rollouts else None,
    }


def score_metrics(graded: Sequence[Rollout], component: str | None) -> dict[str, Any]:
    """Everything about one score: the reward, or one of its components."""
    by_task: dict[int, list[float]] = defaultdict(list)
    by_repeat: dict[int, list[float]] = defaultdict(list)
    for rollout in graded:
        value = rollout.reward if component is None else (rollout.components or {}).get(component)
        if value is not None:
            by_task[rollout.task_index].append(value)
            by_repeat[rollout.repeat_index].append(value)
    values = [value for group in by_task.values() for value in group]
    rule = COMBINATORIAL if set(values) <= {0.0, 1.0} else MAX_OF_FIRST_K
    ks = at_ks(max(map(len, by_task.values())))
    figures: dict[str, Any] = {
        **spread(values),
        **over_repeats([_mean(group) for group in by_repeat.values()]),
        "pass_at_k_rule": rule,
        "pass_at_k": {str(k): pass_at_k(by_task, k, rule) for k in ks},
        "average_at_k": {str(k): average_at_k(by_task, k) for k in ks},
        "tasks_at_k": {str(k): sum(len(group) >= k for group in by_task.values()) for k in ks},
    }
    if component is None and any(rollout.has_answer for rollout in graded):
        answered: dict[int, list[tuple[str | None, float]]] = defaultdict(list)
        for rollout in graded:
            answered[rollout.task_index].append((rollout.answer, rollout.reward or 0.0))
        figures["majority_at_k"] = {str(k): majority_at_k(answered, k) for k in ks}
    return figures


def at_ks(most: int) -> list[int]:
    """1, 2, 4, 8 … and the largest number of rollouts that a task has."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Count, mean, extremes, median and sample standard deviation (null for fewer than two)."""
    return {
        "count": len(values),
        "mean": _mean(values),
        "max": max(values),
        "min": min(values),
        "median": median(values),
        "std": _std(values),
    }


def over_repeats(means: Sequence[float]) -> dict[str, Any]:
    """How sure the mean is, taking every repeat as one run: standard error and 95 % interval by Student's t."""
    deviation = _std(means)
    if deviation is None:
        return {"repeats": len(means), "standard_error": None, "confidence_95": None}
    error = deviation / sqrt(len(means))
    reach = t_quantile_975(len(means) - 1) * error
    return {
        "repeats": len(means),
        "standard_error": error,
        "confidence_95": [_mean(means) - reach, _mean(means) + reach],
    }


def pass_at_k(by_task: _Scores, k: int, rule: str) -> float:
    """How likely the best of k rollouts is, as a mean over the tasks that have k."""
    chosen = [scores for scores in by_task.values() if len(scores) >= k]
    if rule == MAX_OF_FIRST_K:
        return _mean([max(scores[:k]) for scores in chosen])
    return _mean([passed_once(len(scores), sum(score == 1.0 for score in scores), k) for scores in chosen])


def passed_once(n: int, passed: int, k: int) -> float:
    """The share of the k-sets out of n rollouts that hold at least one of the `passed`."""
    return 1.0 - comb(n - passed, k) / comb(n, k)


def average_at_k(by_task: _Scores, k: int) -> float:
    """The mean of the first k rollouts, as a mean over the tasks that have k."""
    return _mean([_mean(scores[:k]) for scores in by_task.values() if len(scores) >= k])


def majority_at_k(by_task: Mapping[int, Sequence[tuple[str | None, float]]], k: int) -> float:
    """The score of the most frequent answer among the first k; ties are averaged, no answer at all is 0."""
    return _mean([_majority(rollouts[:k]) for rollouts in by_task.values() if len(rollouts) >= k])


def _majority(rollouts: Sequence[tuple[str | None, float]]) -> float:
    by_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in rollouts:
        if answer is not None:
            by_answer[answer].append(score)
    if not by_answer:
        return 0.0
    most = max(map(len, by_answer.values()))
    return _mean([_mean(scores) for scores in by_answer.values() if len(scores) == most])


def usage_averages(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """Means of the token counts that are known; an unknown one is left out, never taken for zero."""
    counts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in (rollout.usage or {}).items():
            counts[name].append(value)
    return {name: {"mean": _mean(values), "rows": len(values)} for name, values in sorted(counts.items())}


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
