"""Reasons for an automatic choice: the runner-up, the limit that bars a faster plan, and what would change it."""

from dataclasses import dataclass

from jaxglue.engine.policy import AUTO
from jaxglue.planner.plan import Memory, Plan, gib
from jaxglue.planner.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A chosen plan beside those that it was compared with."""

    chosen: Plan
    runner_up: Plan | None
    """The next plan that fits, by the time of the run; None where no other one does."""
    barred: Plan | None
    """Of faster plans, none of which fits, the one that lacks least memory; None where nothing faster was found."""
    missing: Memory
    """Bytes that it lacks on the GPU and on the host."""

    @property
    def limit(self) -> str:
        """Return what binds the choice: `gpu`, `host`, or `time` where more memory would not help."""
        if self.barred is None:
            return "time"
        return "gpu" if self.missing.device_bytes >= self.missing.host_bytes else "host"

    def __str__(self) -> str:
        parts = [f"{self.chosen} takes {_cost(self.chosen)}"]
        if self.runner_up is not None:
            parts.append(f"runner-up: {self.runner_up} takes {_cost(self.runner_up)}")
        if self.barred is None:
            parts.append("more memory would not help")
        else:
            device, host = (gib(size) for size in self.missing)
            lacks = [f"{device} on the GPU"] * (self.missing.device_bytes > 0)
            lacks += [f"{host} of pinned host memory"] * (self.missing.host_bytes > 0)
            parts.append(f"with {' and '.join(lacks)} more: {self.barred}, {self.barred.seconds * 1e3:,.0f} ms")
        return "; ".join(parts)


def explain(planner: Planner, chosen: Plan, *, host_memory: float, weights: str = AUTO) -> Explanation:
    """Compare a choice with the planner's other plans, which are predicted if they were not.

    Args:
        planner: that chose.
        chosen: its plan.
        host_memory: bytes of host memory that may be pinned.
        weights: places of the layers' weights that were considered.
    """
    if chosen.tile != planner.workload.tile:
        planner = planner.with_rows(planner.workload.seq_len, chosen.tile)
    others = [plan for plan in planner.plans(host_memory, weights) if plan != chosen]
    fitting = [plan for plan in others if planner.fits(plan, host_memory)]
    fastest = min(plan.seconds for plan in (chosen, *fitting))  # the choice may start sooner instead
    faster = (plan for plan in others if plan.seconds < fastest)

    def missing(plan: Plan) -> Memory:
        room = planner.candidates.room
        return Memory(max(round(plan.device_bytes - room), 0), max(round(plan.host_bytes - host_memory), 0))

    barred = min(faster, key=lambda plan: (sum(missing(plan)), plan.seconds), default=None)
    return Explanation(
        chosen=chosen,
        runner_up=min(fitting, key=lambda plan: plan.run_seconds(planner.steps), default=None),
        barred=barred,
        missing=Memory(0, 0) if barred is None else missing(barred),
    )


def _cost(plan: Plan) -> str:
    host = f" and {gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    return f"{plan.seconds * 1e3:,.0f} ms a step in {gib(plan.device_bytes)}{host}"
