"""The process on a device: threads, clock, probing and installation files around `WorkerSession`."""

from device_agent.agent import memory_budget, run_agent
from device_agent.config import AgentConfig

__all__ = ["AgentConfig", "memory_budget", "run_agent"]
