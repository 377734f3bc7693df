"""Choice of an operation's backend: named implementations, what each needs, and the reason for the start-up log."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, cast

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


Reads = Mapping[type, Collection[str] | Mapping[str, Collection[Any] | None] | None]
"""Fields that a backend reads, by the class of a call and of its parts; names, or names with values, None for any.

None in place of fields leaves a class to another operation's check.
"""


@dataclass(frozen=True, kw_only=True)
class Backend[Call, Kernels]:
    """An implementation of an operation, by kernels or by a faster form of its products."""

    check: Callable[[Capability | None, Call], None]
    """Raises NotImplementedError, naming the reason, for a call that it cannot serve."""
    load: Callable[[Capability, Call], Kernels]
    """Imports the kernels and returns the object that launches them."""
    advantage: str
    """Reason for preferring it where it can serve."""
    reads: Reads
    """Any other field of a call must have its default: what a kernel does not read, it would ignore."""
    anywhere: bool = False
    """The backend is a form of the computation without kernels, and serves on any device."""

    def obstacle(self, capability: Capability | None, call: Call) -> str | None:
        """Return the reason why it cannot serve a call; None if it can."""
        try:
            self.check(capability, call)
        except NotImplementedError as reason:
            return str(reason)
        unread = list(unread_fields(call, self.reads))
        return f"it does not read {', '.join(unread)}" if unread else None


def form[Call, Kernels](
    check: Callable[[Capability | None, Call], None], apply: Kernels, advantage: str, reads: Reads
) -> Backend[Call, Kernels]:
    """Return a backend for any device: a form of the computation, which is the function `apply`, and no kernel."""
    return Backend(check=check, load=lambda capability, call: apply, advantage=advantage, reads=reads, anywhere=True)


def unread_fields(value: Any, reads: Reads) -> Iterator[str]:
    """Yield the fields of a call and of its parts that have other values than their defaults and are not read.

    Parts are dataclasses and named tuples, alone or in sequences. One whose class is not in `reads` has no read field.
    """
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        for part in value:
            yield from unread_fields(part, reads)
        return
    read: dict[str, Collection[Any] | None] = {}
    for base in type(value).__mro__:
        if (names := reads.get(base, ())) is None:
            return
        read |= names if isinstance(names, Mapping) else dict.fromkeys(names)
    for name, default in _defaults(value).items():
        field = getattr(value, name)
        if name not in read:
            if default is MISSING or not _equal(field, default):
                yield f"{type(value).__name__}.{name}"
        elif (values := read[name]) is None:
            yield from unread_fields(field, reads)
        elif field not in values:
            yield f"{type(value).__name__}.{name} = {field!r}"


def _defaults(value: Any) -> dict[str, Any]:
    """Return the defaults of the fields of a dataclass or named tuple, MISSING where there is none."""
    if is_dataclass(value):
        return {field.name: field.default for field in fields(value)}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return {name: value._field_defaults.get(name, MISSING) for name in names}  # type: ignore[attr-defined]
    return {}


def _equal(field: Any, default: Any) -> bool:
    """Compare a field with its default, which is no array."""
    return field is default or (not isinstance(field, jax.Array) and type(field) is type(default) and field == default)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation[Call, Kernels]:
    """An operation with a reference that runs anywhere, and backends that are faster where they can serve.

    A call is described whole, by one frozen dataclass: backends refuse a call with a field that they do not read.
    """

    name: str
    backends: Mapping[str, Backend[Call, Kernels]]
    """Backends by name, in order of preference."""
    order: Callable[[Call], Sequence[str]] | None = None
    """Returns the names in order of preference, where it depends on the call."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a user may give as the backend."""
        return "auto", "reference", *self.backends

    def choose(self, capability: Capability | None, call: Call, *, backend: str = "auto") -> BackendChoice:
        """Choose the backend for a call on a GPU of this compute capability (None: no NVIDIA GPU).

        Raises:
            ValueError: `backend` is unknown, or it is named explicitly and cannot serve.
        """
        if backend not in self.names:
            raise ValueError(f"backend must be one of {', '.join(self.names)}, got {backend!r}")
        if backend == "auto":
            return self._choose(capability, call)
        if backend != "reference" and (obstacle := self.backends[backend].obstacle(capability, call)):
            raise ValueError(f"backend={backend!r} cannot serve this {self.name}: {obstacle}")
        return BackendChoice(name=backend, reason="asked for")

    def load(self, call: Call, *, backend: str = "auto") -> Kernels | None:
        """Return the object that launches the chosen backend's kernels on the default device, None for the reference.

        Raises:
            ValueError: see `choose`.
        """
        if backend == "auto" and self in _overrides.get():
            return _overrides.get()[self]
        capability = compute_capability()
        choice = self.choose(capability, call, backend=backend)
        _log.debug("%s by %s: %s", self.name, choice.name, choice.reason)
        if choice.name == "reference":
            return None
        # None comes to forms alone, which do not read it.
        return self.backends[choice.name].load(cast(Capability, capability), call)

    @contextmanager
    def using(self, loaded: Any | None) -> Iterator[None]:
        """Let `auto` load this object (None: the reference) on any device, for tests and measurements."""
        token = _overrides.set({**_overrides.get(), self: loaded})
        try:
            yield
        finally:
            _overrides.reset(token)

    def _choose(self, capability: Capability | None, call: Call) -> BackendChoice:
        names = list(self.order(call) if self.order else self.backends)
        if capability is None and not any(backend.anywhere for backend in self.backends.values()):
            return BackendChoice(name="reference", reason="no NVIDIA GPU", barred=names[0])
        obstacles: list[str] = []
        for index, name in enumerate(names):
            obstacle = self.backends[name].obstacle(capability, call)
            if obstacle is None:
                others = (n for n in names[index + 1 :] if not self.backends[n].obstacle(capability, call))
                return BackendChoice(
                    name=name,
                    reason="; ".join(obstacles) or self.backends[name].advantage,
                    barred=names[0] if obstacles else None,
                    runner_up=next(others, "reference"),
                )
            obstacles.append(f"not {name}: {obstacle}")
        return BackendChoice(name="reference", reason="; ".join(obstacles), barred=names[0])


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


UNTRIED: set[str] = {
    "experts with few rows in training's order",
    "pages looked up a tile before",
    "crowded rows in one order",
}
"""Kernels and the like that no GPU has run, or timed, since they were last changed. Tests marked gpu run them; until
these have passed, no other call does."""


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
