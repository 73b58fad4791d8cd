"""Orders to devices: sealed commands, and the work frames of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import Continued, DecoderSession, Followed, encode_work
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.coordinator.batches import Batch
from hepti_mqtt.runtime.coordinator.fleet import Fleet
from hepti_mqtt.runtime.machinery import Publish


class Orders:
    """Builds the orders to the devices of a site."""

    def __init__(self, topics: Topics, fleet: Fleet) -> None:
        self._topics, self._fleet, self.site = topics, fleet, topics.site

    def command(self, device: str, message: messages.Message) -> Publish:
        """Return a sealed command to a device."""
        return Publish(self._topics.command(device), self._fleet.seal(device, message), 1)

    def cancel(self, plan: Plan, run_ids: Iterable[int], devices: Iterable[str] = ()) -> list[Publish]:
        """Return the commands that cancel runs under a plan, to the given devices or to the plan's."""
        cancels = [messages.Cancel(plan.model, plan.version, run_id) for run_id in run_ids]
        return [self.command(device, cancel) for cancel in cancels for device in tuple(devices) or plan.devices]

    def lease(self, plan: Plan, run_id: int, device: str, tasks: tuple[int, ...]) -> Publish:
        """Return the command that leases a device tasks of a run; without tasks, none is left."""
        return self.command(device, messages.LeaseTasks(plan.model, plan.version, run_id, tasks))

    def end_sessions(self, plan: Plan, sessions: Sequence[int]) -> list[Publish]:
        """Return the commands that drop KV caches on the devices of a plan."""
        if not sessions:
            return []
        message = messages.EndSessions(plan.model, plan.version, tuple(sessions))
        return [self.command(device, message) for device in plan.devices]

    def work(
        self,
        plan: Plan,
        run_id: int,
        part: Batch,
        sessions: tuple[DecoderSession, ...],
        continued: Continued | None = None,
        follows: Followed | None = None,
    ) -> Publish:
        """Return the work frame of a run."""
        key = self._fleet.frame_key(plan)
        payload = encode_work(
            plan.model, plan.version, run_id, part.shape, part.inputs, sessions, key, continued, follows
        )
        return Publish(self._topics.work(plan.model, plan.devices[0]), payload, 1)
