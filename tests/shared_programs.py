"""Programs that tests of runs share: to trace and lower a tiny model takes most of a short run's time."""

import copy
import sys
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from jaxglue.engine.compiler import _whole_products, rounds_as_written
from jaxglue.ops.backend import _overrides, _planned_capability
from jaxglue.sharding.rules import SINGLE_DEVICE

RUNS = ("commands", "objectives", "rl", "serve", "tinker_server", "training")
"""Folders of tests that share; those of the others test programs themselves."""
OWN = {"own_programs", "interpreted", "gpu_target"}
"""Fixtures of tests with programs of their own: they count what is compiled, or choose kernels."""
_TRACED = "jax"
"""Beginning of names of modules that programs may be traced from: JAX's and jaxglue's."""
CALLERS = (
    *("jaxglue.api.session", "jaxglue.commands", "jaxglue.rl", "jaxglue.serve", "jaxglue.tinker", "jaxglue.training"),
    *("jaxglue.engine.executor.Executor", "jaxglue.generation.engine.Engine"),
)
"""Packages, modules and classes that only call shared programs, except for `PARTS`."""
PARTS = tuple(f"jaxglue.training.{module}" for module in ("adamw", "optimizer", "partwise"))
_programs: dict[Hashable, Any] = {}


class NotingPatch(pytest.MonkeyPatch):
    """A patch that notes whether a part of a program has been replaced, by it or by a context of it."""

    changes_programs = False
    """Since the test began."""

    def setattr(self, target: Any, *arguments: Any, **options: Any) -> None:
        """Replace an attribute."""
        self._note(target)
        super().setattr(target, *arguments, **options)

    def setitem(self, mapping: Any, *arguments: Any, **options: Any) -> None:
        """Set an entry, of a table or an environment that a program may read."""
        NotingPatch.changes_programs = True
        super().setitem(mapping, *arguments, **options)

    def _note(self, target: Any) -> None:
        module = target if isinstance(target, str) else getattr(target, "__module__", None)
        module = module or getattr(target, "__name__", None) or type(target).__module__
        name = f"{module}.{target.__qualname__}" if isinstance(target, type) else module
        NotingPatch.changes_programs |= name.startswith(_TRACED) and (is_of(name, PARTS) or not is_of(name, CALLERS))


def is_of(name: str, parents: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of these, or in one of these."""
    return any(f"{name}.".startswith(f"{parent}.") for parent in parents)


def share(patch: pytest.MonkeyPatch) -> None:
    """Let equal models have the same programs until the patch is undone, unless a test replaces a part of them."""
    NotingPatch.changes_programs = False

    def replace(module_name: str, name: str, key_of: Callable[..., Hashable]) -> None:
        if (module := sys.modules.get(module_name)) is None:
            return
        make = getattr(module, name)

        def shared(*arguments: Any, **options: Any) -> Any:
            if NotingPatch.changes_programs or _overrides.get() or _planned_capability.get():
                return make(*arguments, **options)
            key = name, rounds_as_written(), _whole_products.get(), key_of(*arguments, **options)
            try:
                hash(key)
            except TypeError:  # of an objective or a layer of a test
                return make(*arguments, **options)
            if key not in _programs:
                _programs[key] = make(*arguments, **options)
            # A run may choose the layers of a head that multiply in FP8.
            return copy.copy(_programs[key]) if name == "EmbedHead" else _programs[key]

        patch.setattr(module, name, shared)

    replace("jaxglue.engine.executor", "layer_function", lambda layer: layer)
    replace("jaxglue.engine.executor", "LayerFunctions", _of_layer)
    replace("jaxglue.engine.executor", "EmbedHead", _of_head)
    replace("jaxglue.generation.engine", "EnginePrograms", _of_engine)
    replace("jaxglue.training.step", "make_optimizer", _of_optimizer)


def _of_layer(layer: Any, policy: Any, layout: Any = SINGLE_DEVICE, *, replayed: bool = False) -> Hashable:
    return layer, policy, layout.mesh, layout.dtype, replayed


def _of_head(graphdefs: Any, config: Any, *, layout: Any, objective: Any, **options: Any) -> Hashable:
    return graphdefs, config, layout.mesh, layout.dtype, type(objective), objective, *options.items()


def _of_engine(
    graphdefs: Any, config: Any, dtype: Any, attention: str, fp8_layers: Any, drafting: Any = None, *, exact: bool
) -> Hashable:
    return graphdefs, config, dtype, attention, tuple(fp8_layers), drafting, exact


def _of_optimizer(config: Any, total_steps: int, layout: Any) -> Hashable:
    given = object() if config.optimizer != "adamw" else None  # those of tests hold what they were made with
    return given, config, total_steps, layout.mesh, layout.dtype
