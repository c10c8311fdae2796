"""The figures against counting by hand."""

from fractions import Fraction
from itertools import combinations
from math import isclose
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.collector.metrics import (
    COMBINATORIAL,
    MAX_OF_FIRST_K,
    Rollout,
    average_at_k,
    environment_metrics,
    majority_at_k,
    pass_at_k,
    passed_once,
    run_metrics,
)
from services.collector.student import probability_within, t_quantile_975


def _rollouts(*rewards_of_tasks: list[float], **fields: Any) -> list[Rollout]:
    return [
        Rollout("math", task, repeat, reward=reward, **fields)
        for task, rewards in enumerate(rewards_of_tasks)
        for repeat, reward in enumerate(rewards)
    ]


@pytest.mark.behaviour("ME-2")
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_k_sets_that_hold_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    sets = list(combinations(passed, k))
    counted = Fraction(sum(any(chosen) for chosen in sets), len(sets))
    assert isclose(passed_once(len(passed), sum(passed), k), float(counted), abs_tol=1e-12)


@pytest.mark.behaviour("ME-2")
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_tasks_with_fewer_than_k_rollouts_are_left_out(tasks: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, max(map(len, tasks))))
    counted = []
    for rewards in tasks:
        if len(rewards) >= k:
            sets = list(combinations(rewards, k))
            counted.append(sum(max(chosen) for chosen in sets) / len(sets))
    by_task = dict(enumerate(tasks))
    assert isclose(pass_at_k(by_task, k, COMBINATORIAL), sum(counted) / len(counted), abs_tol=1e-12)
    kept = [rewards[:k] for rewards in tasks if len(rewards) >= k]
    averages = [sum(rewards) / k for rewards in kept]
    assert isclose(average_at_k(by_task, k), sum(averages) / len(averages), abs_tol=1e-12)
    best = [max(rewards) for rewards in kept]
    assert isclose(pass_at_k(by_task, k, MAX_OF_FIRST_K), sum(best) / len(best), abs_tol=1e-12)


@pytest.mark.behaviour("ME-2")
def test_one_rule_holds_for_all_tasks_of_a_score() -> None:
    score = environment_metrics(_rollouts([0, 1, 0], [0.5, 1, 0]))["scores"]["reward"]
    assert score["pass_at_k_rule"] == MAX_OF_FIRST_K
    assert score["pass_at_k"] == {"1": 0.25, "2": 1.0, "3": 1.0}
    score = environment_metrics(_rollouts([0, 1, 0], [1, 1]))["scores"]["reward"]
    assert score["pass_at_k_rule"] == COMBINATORIAL
    assert score["pass_at_k"]["1"] == pytest.approx((1 / 3 + 1) / 2)
    assert score["pass_at_k"]["3"] == 1.0
    assert score["tasks_at_k"] == {"1": 2, "2": 2, "3": 1}


@pytest.mark.behaviour("ME-2")
def test_the_first_k_follow_the_repeat_index_and_not_the_order_of_arrival() -> None:
    late = [Rollout("math", 0, repeat, reward=reward) for repeat, reward in ((2, 0.9), (0, 0.1), (1, 0.2))]
    assert environment_metrics(late)["scores"]["reward"]["pass_at_k"] == {"1": 0.1, "2": 0.2, "3": 0.9}


@pytest.mark.behaviour("ME-2")
def test_majority_averages_ties_and_gives_nothing_for_no_answer() -> None:
    tasks: dict[int, list[tuple[str | None, float]]] = {
        0: [("4", 1.0), ("5", 0.0), ("5", 0.0)],
        1: [("4", 1.0), ("5", 0.0), (None, 0.0)],
        2: [(None, 0.0), (None, 0.0), (None, 0.0)],
    }
    assert majority_at_k(tasks, 3) == pytest.approx((0.0 + 0.5 + 0.0) / 3)
    assert majority_at_k(tasks, 1) == pytest.approx(2 / 3)


@pytest.mark.behaviour("ME-2")
def test_majority_is_given_only_where_answers_are_extracted() -> None:
    assert "majority_at_k" not in environment_metrics(_rollouts([1.0]))["scores"]["reward"]
    with_answers = environment_metrics(_rollouts([1.0], has_answer=True, answer="4"))
    assert with_answers["scores"]["reward"]["majority_at_k"] == {"1": 1.0}


@pytest.mark.behaviour("ME-2")
def test_spread_standard_error_and_interval_are_the_textbook_s() -> None:
    # Repeats as runs: means 0.5, 1.0, 0.0; s = 0.5; t(2) = 4.3027.
    score = environment_metrics(_rollouts([0, 1, 0], [1, 1, 0]))["scores"]["reward"]
    assert (score["count"], score["mean"], score["max"], score["min"], score["median"]) == (6, 0.5, 1, 0, 0.5)
    assert score["std"] == pytest.approx(0.547723, abs=1e-6)
    assert score["repeats"] == 3
    assert score["standard_error"] == pytest.approx(0.5 / 3**0.5)
    low, high = score["confidence_95"]
    assert (low, high) == pytest.approx((0.5 - 4.302653 * 0.5 / 3**0.5, 0.5 + 4.302653 * 0.5 / 3**0.5), abs=1e-5)


def test_a_single_repeat_has_no_interval() -> None:
    score = environment_metrics(_rollouts([1.0], [0.0]))["scores"]["reward"]
    assert score["standard_error"] is None
    assert score["confidence_95"] is None


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_the_t_quantile_is_the_table_s(degrees: int, expected: float) -> None:
    assert t_quantile_975(degrees) == pytest.approx(expected, abs=1e-4)
    assert probability_within(t_quantile_975(degrees), degrees) == pytest.approx(0.95)


@pytest.mark.behaviour("ME-1")
def test_masked_and_failed_rows_are_coverage_and_never_quality() -> None:
    rollouts = [
        Rollout("math", 0, 0, reward=1.0),
        Rollout("math", 1, 0, reward=0.0, masked=True),
        Rollout("math", 2, 0, failure_kind="deadline"),
        Rollout("math", 3, 0),
    ]
    metrics = environment_metrics(rollouts)
    assert metrics["coverage"] == {
        "rows": 4, "graded": 1, "masked": 1, "failed": 1, "without_outcome": 1, "coverage": 0.25
    }  # fmt: skip
    assert metrics["scores"]["reward"]["mean"] == 1.0
    assert metrics["failures"] == {"deadline": 1}


@pytest.mark.behaviour("ME-1")
def test_where_all_are_masked_there_is_only_coverage() -> None:
    metrics = environment_metrics(_rollouts([1.0, 0.0], masked=True))
    assert metrics["scores"] == {}
    assert metrics["tasks"] == []
    assert metrics["coverage"]["masked"] == 2


@pytest.mark.behaviour("ME-3")
def test_unknown_token_counts_are_left_out_of_the_average() -> None:
    rollouts = [
        Rollout("math", 0, 0, reward=1.0, usage={"total_tokens": 10, "cached_tokens": 0}),
        Rollout("math", 1, 0, reward=1.0, usage=None),
        Rollout("math", 2, 0, reward=1.0, usage={"total_tokens": 20}),
    ]
    assert environment_metrics(rollouts)["usage"] == {
        "cached_tokens": {"mean": 0.0, "rows": 1},
        "total_tokens": {"mean": 15.0, "rows": 2},
    }


def test_environments_and_components_are_told_apart() -> None:
    rollouts = [
        Rollout("math", 0, 0, reward=1.0, components={"format": 0.5}),
        Rollout("gpqa", 1, 0, reward=0.0),
    ]
    metrics = run_metrics(rollouts)
    assert list(metrics) == ["gpqa", "math"]
    assert metrics["math"]["scores"]["reward_components.format"]["mean"] == 0.5
