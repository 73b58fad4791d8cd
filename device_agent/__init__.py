"""The process on a device: threads, clock, probing and installation files around `WorkerSession`."""

from device_agent.agent import run_agent
from device_agent.config import AgentConfig
from device_agent.machine import memory_budget

__all__ = ["AgentConfig", "memory_budget", "run_agent"]
