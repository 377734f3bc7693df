"""Predicted settings of a training step, and the memory they may take."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxglue.engine.policy import AUTO, RematPolicy, format_policies, parse_policies
from jaxglue.engine.residency import format_weights, is_streamed
from jaxglue.planner.gpus import GIB

MARGIN = 0.05
"""Share of the GPU's memory that a plan leaves free, for the error of predictions and for fragmentation."""
SMALL_VALUES = 4 * 2**20
"""Most bytes of a layer's offloaded values that stay on the device: the host takes longer to start their copies than
these take, and layers that keep everything can share a program."""


class DoesNotFit(ValueError):  # noqa: N818
    """Reports that a setting, or every setting, needs more memory than there is."""


class Memory(NamedTuple):
    """Memory that a setting takes, bytes."""

    device_bytes: int
    """Bytes of GPU memory at the peak."""
    host_bytes: int
    """Bytes of pinned host memory."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting with its predicted cost."""

    policies: tuple[RematPolicy, ...]
    """One for each layer."""
    weights: tuple[str, ...]
    """Place of each layer's frozen weights (see `residency`)."""
    seconds: float
    """Seconds of an optimizer step."""
    device_bytes: int
    """At the peak."""
    host_bytes: int
    """Bytes of pinned host memory."""
    offloaded_bytes: int = 0
    """Bytes of values among them."""
    mapped_bytes: int = 0
    """Bytes of weights that are read from their files."""
    tile: int | None = None
    """Tokens that pass through a layer at a time, apart from attention; None for all."""
    layers_per_program: int = 1
    """Consecutive layers dispatched as one program."""
    one_program: bool = False
    """A micro-batch is one program, embedding and head included."""
    compile_seconds: float = 0.0
    """Seconds of compilation, with nothing compiled before."""
    pinning_seconds: float = 0.0
    """Seconds of pinning host memory for values that compilation does not hide."""

    @property
    def start_seconds(self) -> float:
        """Return the seconds that the first step takes longer than others."""
        return self.compile_seconds + self.pinning_seconds

    def run_seconds(self, steps: int | None) -> float:
        """Return the seconds of a run's start and steps; those of a step where their number is unknown."""
        return self.seconds if steps is None else self.start_seconds + steps * self.seconds

    @property
    def start(self) -> str:
        """Return the text of these seconds, of compilation first."""
        pinning = f", pinning {self.pinning_seconds:.0f} s" if self.pinning_seconds >= 1 else ""
        return f"{self.compile_seconds:.0f} s{pinning}"

    @property
    def remat(self) -> str:
        """Return the policies as `parse_policies` reads them, such as `full` or `10 x full + 26 x dots`."""
        return format_policies(self.policies)

    def in_place_of(self, remat: str) -> str:
        """Return a note where the policies asked for would offload values that stay on the GPU, else an empty text."""
        if remat == AUTO or parse_policies(remat, len(self.policies)) == self.policies:
            return ""
        return f"in place of {remat}: up to {SMALL_VALUES // 2**20} MiB of a layer stay on the GPU"

    @property
    def places(self) -> str:
        """Return the weights' places as `parse_weights` reads them, such as `device` or `20 x device & 12 x host`."""
        return format_weights(self.weights)

    def __str__(self) -> str:
        tile = f" --tile {self.tile}" if self.tile else ""
        if not is_streamed(self.weights):
            return f"--remat {self.remat!r}{tile}"
        return f"--remat {self.remat!r} --weights {self.places if ' ' not in self.places else repr(self.places)}{tile}"


def by_time(plan: Plan) -> tuple[float, int]:
    """Return the key by which the fastest plan comes first."""
    return plan.seconds, plan.device_bytes


def gib(count: float) -> str:
    """Format bytes."""
    return f"{count / GIB:.1f} GiB"
