"""Reasons for an automatic choice: the runner-up, the limit that bars a faster plan, and what would change it."""

from dataclasses import dataclass, replace

from jaxglue.engine.layer_groups import why_not_grouped
from jaxglue.engine.policy import AUTO, PRESETS
from jaxglue.engine.residency import DEVICE, HOST, is_streamed
from jaxglue.planner.candidates import tile_sizes
from jaxglue.planner.plan import Memory, Plan, gib
from jaxglue.planner.planner import Planner, embedding_places

_LIMITS = {"gpu": "the GPU's memory", "host": "pinned host memory", "time": "time alone"}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """An automatic choice on one line."""

    choice: str
    limit: str
    """Binding limit."""
    runner_up: str | None = None
    """The alternative, with its predicted time or the bytes that it lacks."""
    change: str | None = None
    """A change of settings or memory that would change the choice."""

    def __str__(self) -> str:
        parts = [self.choice, f"bound by {self.limit}"]
        parts += [f"runner-up: {self.runner_up}"] if self.runner_up else []
        return "; ".join(parts + ([f"to change it: {self.change}"] if self.change else []))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A chosen plan beside those that it was compared with."""

    chosen: Plan
    runner_up: Plan | None
    """The next plan that fits, by the time of the run; None where no other one does."""
    barred: Plan | None
    """The faster plan that lacks least memory, as no faster one fits; None where nothing faster was found."""
    missing: Memory
    """Bytes that it lacks on the GPU and on the host."""

    @property
    def limit(self) -> str:
        """Return the binding constraint: `gpu`, `host`, or `time` where more memory would not help."""
        if self.barred is None:
            return "time"
        return "gpu" if self.missing.device_bytes >= self.missing.host_bytes else "host"

    @property
    def reason(self) -> Reason:
        """Return it on one line."""
        change = "nothing known is faster, so more memory would not help"
        if self.barred is not None:
            change = f"{_lacking(self.missing)} more, for {self.barred} at {_milliseconds(self.barred)}"
        return Reason(
            choice=f"{self.chosen.remat}, {_cost(self.chosen)}",
            limit=_LIMITS[self.limit],
            runner_up=None if self.runner_up is None else f"{self.runner_up}, {_cost(self.runner_up)}",
            change=change,
        )


def explain(planner: Planner, chosen: Plan, *, host_memory: float, weights: str = AUTO) -> Explanation:
    """Compare a choice with the planner's other plans, which are predicted if they were not.

    Args:
        planner: that chose.
        chosen: its plan.
        host_memory: bytes of host memory that may be pinned.
        weights: places of the layers' weights that were considered.
    """
    planner = _planner_of_tile(planner, chosen)
    others = [plan for plan in planner.plans(host_memory, weights) if plan != chosen]
    fitting = [plan for plan in others if planner.fits(plan, host_memory)]
    fastest = min(plan.seconds for plan in (chosen, *fitting))  # the choice may start sooner instead
    faster = (plan for plan in others if plan.seconds < fastest)

    barred = min(faster, key=lambda plan: (sum(_missing(planner, plan, host_memory)), plan.seconds), default=None)
    return Explanation(
        chosen=chosen,
        runner_up=min(fitting, key=lambda plan: plan.run_seconds(planner.steps), default=None),
        barred=barred,
        missing=Memory(0, 0) if barred is None else _missing(planner, barred, host_memory),
    )


def plan_reasons(
    planner: Planner, chosen: Plan, *, host_memory: float, remat: str, weights: str, embeddings: str
) -> dict[str, Reason]:
    """Explain a plan's choices by the name of the setting; settings that were given are left out.

    Args:
        planner: that chose, with the embeddings where they are.
        chosen: its plan.
        host_memory: bytes of host memory that may be pinned.
        remat: as it was given, perhaps `auto`; likewise the others.
        weights: places of the layers' weights.
        embeddings: place of the table.
    """
    comparison = _Comparison(planner, chosen, host_memory)
    reasons = {}
    if remat == AUTO:
        reasons["remat"] = explain(planner, chosen, host_memory=host_memory, weights=weights).reason
    if weights == AUTO:
        reasons["weights"] = comparison.weights()
    if planner.workload.tile is None:
        reasons["tile"] = comparison.tile()
    if planner.predictor.layers_per_program is None:
        reasons["layers per program"] = comparison.layers_per_program()
    if embeddings == AUTO:
        reasons["embeddings"] = comparison.embeddings()
    return reasons


class _Comparison:
    """A chosen plan and the same plan with one setting changed."""

    def __init__(self, planner: Planner, chosen: Plan, host_memory: float):
        self._given, self._chosen, self._host_memory = planner, chosen, host_memory
        self._planner = _planner_of_tile(planner, chosen)

    def weights(self) -> Reason:
        """Explain the places of the layers' weights."""
        if not any(self._planner.predictor.resident.frozen_layers):
            return Reason(choice=DEVICE, limit="the method: all weights train, on the GPU")
        streams = is_streamed(self._chosen.weights)
        other = DEVICE if streams else HOST
        alternative = self._planner.plan(self._chosen.policies, weights=other)
        return self._against(self._chosen.places, other, alternative)

    def tile(self) -> Reason:
        """Explain the tokens that pass through a layer at a time."""
        work, chosen, full = self._given.workload, self._chosen, PRESETS["full"]
        if chosen.tile:
            whole = self._given.plan(full, weights=chosen.weights)
            return self._against(f"{chosen.tile:,} tokens", "whole rows with --remat full", whole)
        if not (sizes := tile_sizes(work.tokens)):
            return Reason(choice="whole rows", limit=f"their length: {work.tokens:,} tokens are too few for tiles")
        tiled = self._given.with_rows(work.seq_len, sizes[0]).plan(full, weights=chosen.weights)
        return self._against("whole rows", f"--tile {sizes[0]} with --remat full", tiled)

    def layers_per_program(self) -> Reason:
        """Explain how many layers are dispatched together."""
        chosen, layers = self._chosen, len(self._chosen.policies)
        size = chosen.layers_per_program
        obstacle = why_not_grouped(chosen.policies, stream_weights=is_streamed(chosen.weights))
        if obstacle:
            return Reason(choice="1", limit=f"an obstacle: {obstacle}")
        other = 1 if size > 1 else layers
        if other == size:
            return Reason(choice=str(size), limit="the model: it has one layer")
        alternative = self._planner.plan(chosen.policies, weights=chosen.weights, layers_per_program=other)
        return self._against(str(size), str(other), alternative, flag="--layers-per-program")

    def embeddings(self) -> Reason:
        """Explain the place of the embedding table and the output projection."""
        work, names = self._planner.workload, {False: DEVICE, True: HOST}
        choice = names[work.host_embeddings]
        if len(embedding_places(replace(work, host_embeddings=False), AUTO)) == 1:
            return Reason(
                choice=choice, limit="the model: a tied or trained table, or one on several GPUs, stays there"
            )
        other = self._planner.on(replace(work, host_embeddings=not work.host_embeddings))
        alternative = other.plan(self._chosen.policies, weights=self._chosen.weights)
        reason = self._against(choice, names[not work.host_embeddings], alternative)
        if is_streamed(self._chosen.weights) or work.host_embeddings:
            return reason
        return replace(reason, limit="the layers' weights: none are streamed")

    def _against(self, choice: str, name: str, alternative: Plan, flag: str = "") -> Reason:
        """Explain a choice by one alternative: too large, or slower."""
        missing = _missing(self._planner, alternative, self._host_memory)
        if any(missing):
            limit = _LIMITS["gpu" if missing.device_bytes >= missing.host_bytes else "host"]
            lacks = f"{name}, {_milliseconds(alternative)}, lacks {_lacking(missing)}"
            faster = alternative.seconds < self._chosen.seconds
            change = f"{_lacking(missing)} more" if faster else "nothing: it would be slower, too"
            return Reason(choice=choice, limit=limit, runner_up=lacks, change=change)
        fits = f"{name}, {_milliseconds(alternative)} beside {_milliseconds(self._chosen)}"
        return Reason(choice=choice, limit=_LIMITS["time"], runner_up=fits, change=flag and f"{flag} {name}")


def _planner_of_tile(planner: Planner, plan: Plan) -> Planner:
    """Return the planner of the plan's tile."""
    return planner if plan.tile == planner.workload.tile else planner.with_rows(planner.workload.seq_len, plan.tile)


def _missing(planner: Planner, plan: Plan, host_memory: float) -> Memory:
    """Return the bytes that a plan lacks on the GPU and on the host."""
    room = planner.candidates.room
    return Memory(max(round(plan.device_bytes - room), 0), max(round(plan.host_bytes - host_memory), 0))


def _lacking(missing: Memory) -> str:
    device, host = (gib(size) for size in missing)
    parts = [f"{device} on the GPU"] * (missing.device_bytes > 0)
    return " and ".join(parts + [f"{host} of pinned host memory"] * (missing.host_bytes > 0))


def _milliseconds(plan: Plan) -> str:
    return f"{plan.seconds * 1e3:,.1f} ms" if plan.seconds < 0.1 else f"{plan.seconds * 1e3:,.0f} ms"


def _cost(plan: Plan) -> str:
    host = f" and {gib(plan.host_bytes)} on the host" if plan.host_bytes else ""
    return f"{_milliseconds(plan)} a step in {gib(plan.device_bytes)}{host}"
