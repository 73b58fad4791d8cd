"""Statistics for the dashboard: the planner's outcomes of all requests, and the gateway's own errors."""

from hepti_mqtt.core.errors import DeadlineError, RequestError
from hepti_mqtt.gateway.statistics import ERRORS, HOUR_S, GatewayStatistics

NOW_S = 1e9


def _answer(at_s, outcome="ok"):
    return {"time": at_s, "model": "m", "outcome": outcome, "latency_ms": 5.0, "predicted_ms": None, "plan": None}


def test_errors_of_all_clients_are_shown_once_and_own_ones_with_words():
    statistics = GatewayStatistics()
    statistics.add_error("m", RequestError("too long"), NOW_S - 10)
    statistics.add_error("m", DeadlineError("late"), NOW_S - 5)  # which the planner does not know of
    served = [_answer(NOW_S - 20), _answer(NOW_S - 10.5, "bad_request"), _answer(NOW_S - 1, "overloaded")]
    shown = statistics.to_dict(served, NOW_S)
    assert [(error["code"], error["message"]) for error in shown["errors"]] == [
        ("bad_request", "too long"),
        ("deadline", "late"),
        ("overloaded", ""),
    ]
    assert shown["answers"] == served[:1]


def test_tokens_per_second_are_those_of_the_last_seconds():
    statistics = GatewayStatistics()
    assert statistics.tokens_per_s(NOW_S) is None
    for step in range(40):
        statistics.add_token(NOW_S - 4 + step / 10)
    assert statistics.tokens_per_s(NOW_S) == 10
    assert statistics.tokens_per_s(NOW_S + 60) is None


def test_what_is_older_than_an_hour_or_too_much_is_left_out():
    served = [_answer(NOW_S - HOUR_S - 1, "overloaded"), *(_answer(NOW_S, "overloaded") for _ in range(2 * ERRORS))]
    assert len(GatewayStatistics().to_dict(served, NOW_S)["errors"]) == ERRORS
