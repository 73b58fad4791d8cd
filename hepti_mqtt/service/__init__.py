"""The planner process: membership, re-planning, request coordination, model store."""

from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig

__all__ = ["PlannerConfig", "run_planner"]
