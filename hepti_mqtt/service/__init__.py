"""The planner process: membership, re-planning, request coordination, model store."""

from hepti_mqtt.service.config import PlannerConfig
from hepti_mqtt.service.planner import run_planner

__all__ = ["PlannerConfig", "run_planner"]
