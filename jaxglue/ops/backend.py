"""Choice of an operation's backend: named implementations, what each needs, and the reason for the start-up log."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, (major, minor)."""

AMPERE, HOPPER = (8, 0), (9, 0)
_log = logging.getLogger(__name__)
_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_planned_capability: ContextVar[Capability | None] = ContextVar("planned_capability", default=None)
_one_device: ContextVar[bool] = ContextVar("one_device", default=False)
_overrides: ContextVar[Mapping["Operation", Any]] = ContextVar("overrides", default={})  # noqa: B039


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend's name and the reason for it."""

    name: str
    reason: str
    barred: str | None = None
    """The preferred backend, where it cannot serve."""
    runner_up: str | None = None
    """The next backend that can serve; None for the reference, and for a backend asked for."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """An implementation of an operation, by kernels or by a faster form of its products."""

    check: Callable[..., None]
    """`check(capability, *call)` raises NotImplementedError, naming the reason, for a call that it cannot serve."""
    load: Callable[..., Any]
    """`load(capability, *call)` imports the kernels and returns the object that launches them."""
    advantage: str
    """Reason for preferring it where it can serve."""
    anywhere: bool = False
    """The backend is a form of the computation without kernels, and serves on any device."""


def form(check: Callable[..., None], apply: Callable[..., Any], advantage: str) -> Backend:
    """Return a backend for any device: a form of the computation, which is the function `apply`, and no kernel."""
    return Backend(check=check, load=lambda capability, *call: apply, advantage=advantage, anywhere=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """An operation with a reference that runs anywhere, and backends that are faster where they can serve.

    A call is described by the arguments of its backends' `check` and `load`, such as the dtype.
    """

    name: str
    backends: Mapping[str, Backend]
    """Backends by name, in order of preference."""
    order: Callable[..., Sequence[str]] | None = None
    """`order(*call)` returns the names in order of preference, where it depends on the call."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a user may give as the backend."""
        return "auto", "reference", *self.backends

    def choose(self, capability: Capability | None, *call: Any, backend: str = "auto") -> BackendChoice:
        """Choose the backend for a call on a GPU of this compute capability (None: no NVIDIA GPU).

        Raises:
            ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
        """
        if backend not in self.names:
            raise ValueError(f"backend must be one of {', '.join(self.names)}, got {backend!r}")
        if backend == "auto":
            return self._choose(capability, *call)
        if backend != "reference" and (obstacle := self._obstacle(backend, capability, *call)):
            raise ValueError(f"backend={backend!r} cannot serve this {self.name}: {obstacle}")
        return BackendChoice(name=backend, reason="asked for")

    def load(self, *call: Any, backend: str = "auto") -> Any | None:
        """Return the object that launches the chosen backend's kernels on the default device, None for the reference.

        Raises:
            ValueError: see `choose`.
        """
        if backend == "auto" and self in _overrides.get():
            return _overrides.get()[self]
        capability = compute_capability()
        choice = self.choose(capability, *call, backend=backend)
        _log.debug("%s by %s: %s", self.name, choice.name, choice.reason)
        return None if choice.name == "reference" else self.backends[choice.name].load(capability, *call)

    @contextmanager
    def using(self, loaded: Any | None) -> Iterator[None]:
        """Let `auto` load this object (None: the reference) on any device, for tests and measurements."""
        token = _overrides.set({**_overrides.get(), self: loaded})
        try:
            yield
        finally:
            _overrides.reset(token)

    def _choose(self, capability: Capability | None, *call: Any) -> BackendChoice:
        names = list(self.order(*call) if self.order else self.backends)
        if capability is None and not any(backend.anywhere for backend in self.backends.values()):
            return BackendChoice(name="reference", reason="no NVIDIA GPU", barred=names[0])
        obstacles: list[str] = []
        for index, name in enumerate(names):
            obstacle = self._obstacle(name, capability, *call)
            if obstacle is None:
                return BackendChoice(
                    name=name,
                    reason="; ".join(obstacles) or self.backends[name].advantage,
                    barred=names[0] if obstacles else None,
                    runner_up=next(
                        (n for n in names[index + 1 :] if not self._obstacle(n, capability, *call)), "reference"
                    ),
                )
            obstacles.append(f"not {name}: {obstacle}")
        return BackendChoice(name="reference", reason="; ".join(obstacles), barred=names[0])

    def _obstacle(self, name: str, capability: Capability | None, *call: Any) -> str | None:
        try:
            self.backends[name].check(capability, *call)
        except NotImplementedError as reason:
            return str(reason)
        return None


@contextmanager
def tracing_for(capability: Capability | None) -> Iterator[None]:
    """Trace for a GPU that need not be present; traced programs cannot execute."""
    token = _planned_capability.set(capability)
    try:
        yield
    finally:
        _planned_capability.reset(token)


def compute_capability(device: jax.Device | None = None) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU, None for any other device.

    Args:
        device: by default the GPU of `tracing_for`, else the first local device.
    """
    if device is None and (planned := _planned_capability.get()) is not None:
        return planned
    device = device or jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def triton_capability(capability: Capability) -> int:
    """Return the compute capability in Triton's form: 90 for 9.0."""
    return 10 * capability[0] + capability[1]


def has_jax_triton() -> bool:
    """Return whether jax-triton is installed, without importing it."""
    return find_spec("jax_triton") is not None


def check_triton(capability: Capability | None, dtype=None) -> None:
    """Raise NotImplementedError where our kernels cannot serve: GPU, installation, or a dtype that is not 16-bit."""
    check_capability(capability, AMPERE)
    if not has_jax_triton():
        raise NotImplementedError("jax-triton is not installed: pip install '.[cuda13]' in the clone of jaxglue")
    if dtype is not None:
        check_half(dtype)


def check_triton_rank(capability: Capability | None, dtype, rank: int, *, largest: int) -> None:
    """Raise NotImplementedError where `check_triton` does, or for adapters of more than `largest` ranks."""
    check_triton(capability, dtype)
    if rank > largest:
        raise NotImplementedError(f"rank must be at most {largest}, got {rank}")


def check_capability(capability: Capability | None, least: Capability) -> None:
    """Raise NotImplementedError without an NVIDIA GPU of at least this compute capability."""
    if capability is None:
        raise NotImplementedError("no NVIDIA GPU")
    if capability < least:
        needed, got = (".".join(map(str, version)) for version in (least, capability))
        raise NotImplementedError(f"compute capability must be {needed} or newer, got {got}")


def check_hopper(capability: Capability | None) -> None:
    """Raise NotImplementedError for any other GPU than Hopper's, for whose shared memory tiles are made."""
    check_capability(capability, HOPPER)
    if capability is not None and capability[0] != HOPPER[0]:
        raise NotImplementedError(f"tiles are for compute capability 9.0, got {'.'.join(map(str, capability))}")


UNTRIED: set[str] = set()
"""Kernels and the like that no GPU has run since they were last changed. Tests marked gpu run them; until these have
passed, no other call does."""


def check_tried(kernel: str) -> None:
    """Raise NotImplementedError for a kernel of `UNTRIED`."""
    if kernel in UNTRIED:
        raise NotImplementedError("no GPU has run the kernel since it was last changed")


@contextmanager
def one_device_each() -> Iterator[None]:
    """Let kernels that are not partitioned serve programs traced in the context: their arrays lie on one device."""
    token = _one_device.set(True)
    try:
        yield
    finally:
        _one_device.reset(token)


def check_one_device() -> None:
    """Raise NotImplementedError where arrays may lie on several devices, as kernels are not partitioned."""
    if jax.device_count() > 1 and not _one_device.get():
        raise NotImplementedError("arrays may lie on several devices")


def check_half(dtype) -> None:
    """Raise NotImplementedError unless the dtype is a 16-bit float."""
    if jnp.dtype(dtype) not in _HALF:
        raise NotImplementedError(f"dtype must be bfloat16 or float16, got {dtype}")
