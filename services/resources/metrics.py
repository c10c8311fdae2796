"""Metrics over many results of one entry. Masked and failed ones count as gaps in coverage, never as scores."""

from collections import Counter
from statistics import fmean, pstdev
from typing import Any

import orjson

from services.resources.entries import Entry
from shared.errors import BadRowError, FieldProblem


def read_results(body: bytes) -> list[dict[str, Any]]:
    """The results of `{"results": […]}` or of a bare list.

    Raises:
        BadRowError: the body is neither.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRowError.of([FieldProblem(("body",), f"is not JSON: {error}", "json_invalid")]) from error
    results = parsed.get("results") if isinstance(parsed, dict) else parsed
    if not isinstance(results, list):
        raise BadRowError.of([FieldProblem(("results",), "must be a list of results", "list_type")])
    wrong = [index for index, result in enumerate(results) if not isinstance(result, dict)]
    if wrong:
        raise BadRowError.of([FieldProblem(("results", index), "must be an object", "dict_type") for index in wrong])
    return results


def aggregate(entry: Entry, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known of the results; a verifier that offers `aggregate(results)` adds its own fields."""
    graded = [result for result in results if _is_graded(result)]
    rewards = [float(result["reward"]) for result in graded]
    gaps = Counter(_gap(result) for result in results if not _is_graded(result))
    metrics: dict[str, Any] = {
        "count": len(results),
        "graded": len(graded),
        "coverage": len(graded) / len(results) if results else None,
        "mean_reward": fmean(rewards) if rewards else None,
        "reward_deviation": pstdev(rewards) if rewards else None,
        "mean_reward_components": _component_means(graded),
        "gaps": dict(sorted(gaps.items())),
    }
    own = getattr(entry.verifier, "aggregate", None)
    if callable(own):
        metrics[entry.settings.verifier] = own(graded)
    return metrics


def _is_graded(result: dict[str, Any]) -> bool:
    reward = result.get("reward")
    return isinstance(reward, int | float) and not isinstance(reward, bool) and not result.get("mask_sample")


def _gap(result: dict[str, Any]) -> str:
    """Why a result counts not: its failure's kind, in either of the two shapes that results have."""
    failure = result.get("failure")
    nested = failure.get("failure_kind") if isinstance(failure, dict) else None
    kind = nested or result.get("failure_kind") or result.get("_ng_failure_class")
    return str(kind) if kind else "masked"


def _component_means(graded: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for result in graded:
        components = result.get("reward_components")
        for name, value in components.items() if isinstance(components, dict) else ():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(float(value))
    return {name: fmean(numbers) for name, numbers in sorted(values.items())}
