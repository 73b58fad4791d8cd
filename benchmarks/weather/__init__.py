"""Weather: a whole site under noise and change on a virtual clock, with a real coordinator, to judge its decisions.

    from hepti_mqtt.service.solver import solve
    from benchmarks.weather import judge, make_truth, play
    truth = make_truth("still", cluster, minutes=30, seed=1)  # or "stalls", "walk", "changes"; or recorded_truth(...)
    played = play(cluster, spec, truth, solve)                # a `History`: answers, changes of plan, searches, log
    verdict = judge(played)                                   # changes and loads per hour, regret, worst, by phase

`truth` says what devices and links really do and what their meters say of it; `site` and `devices` let that meet a
`CoordinatorSession` through its events and commands alone; `verdict` compares with the best plan in hindsight and
`picture` draws. On the command line: `python -m benchmarks.weather still walk --sites 5 --minutes 30`.
"""

from __future__ import annotations

from benchmarks.weather.picture import weather_svg
from benchmarks.weather.site import Change, History, play
from benchmarks.weather.truth import KINDS, Truth, make_truth, recorded_truth
from benchmarks.weather.verdict import PhaseVerdict, Verdict, judge

__all__ = [
    "KINDS",
    "Change",
    "History",
    "PhaseVerdict",
    "Truth",
    "Verdict",
    "judge",
    "make_truth",
    "play",
    "recorded_truth",
    "weather_svg",
]
