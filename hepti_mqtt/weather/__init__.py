"""Weather: a whole site under noise and change on a virtual clock, with a real coordinator, to judge its decisions.

    from hepti_mqtt.service.solver import solve
    from hepti_mqtt.weather import judge, make_truth, play
    truth = make_truth("still", cluster, minutes=30, seed=1)  # or "stalls", "walk", "changes"; or recorded_truth(...)
    played = play(cluster, spec, truth, solve)                # a `History`: answers, changes of plan, searches, log
    verdict = judge(played)                                   # changes and loads per hour, regret, worst, by phase

`truth` says what devices and links really do and what their meters say of it; `site` and `devices` let that meet a
`CoordinatorSession` through its events and commands alone; `verdict` compares with the best plan in hindsight and
`picture` draws. On the command line: `hepti simulate MODEL --devices-file FILE --weather still`; many sites at once:
`make test-weather MINUTES=30 SITES=5 WEATHER="still walk"`.
"""

from __future__ import annotations

from hepti_mqtt.weather.picture import weather_svg
from hepti_mqtt.weather.site import Change, History, play
from hepti_mqtt.weather.truth import KINDS, Truth, make_truth, recorded_truth
from hepti_mqtt.weather.verdict import PhaseVerdict, Verdict, judge

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
