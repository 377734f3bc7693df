"""The one rule by which an adapter fits a base, for generation, export and further training."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from jaxglue.hf.adapter import Adapter
from jaxglue.hf.identity import Identity, difference
from jaxglue.models.lora import is_target
from jaxglue.models.lora_config import ALL_LINEAR

_SHOWN = 3
_CLASS = "ForCausalLM"
_log = logging.getLogger(__name__)


def check_adapter(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], base: Identity, name: str) -> None:
    """Refuse an adapter that was trained on another base, or that lacks a module it targets.

    An adapter that records no base, as PEFT's do not, is reported and checked by names and shapes alone.

    Args:
        adapter: of a folder.
        shapes: of the base's linear layers, by path (`linear_shapes`).
        base: the base's identity.
        name: of the base, for messages.

    Raises:
        ValueError: another base or family, a missing or superfluous module, or another shape.
    """
    refusal = f"{adapter.folder} does not belong to {name}"
    if "weights" not in base:
        pass  # weights from memory
    elif adapter.base is None:
        _log.warning("%s records no base: checked by names and shapes alone against %s", adapter.folder, name)
    elif found := difference(adapter.base, base):
        raise ValueError(f"{refusal}: {found}; use the base that it was trained on")
    _check_family(adapter, base["model_type"], refusal)
    if extra := sorted(set(adapter.modules) - shapes.keys()):
        raise ValueError(f"{refusal}: it adapts {_some(extra)}, missing from the base")
    for path in adapter.modules:
        a, b = (adapter.tensors[f"{path}.{matrix}"] for matrix in ("lora_A", "lora_B"))
        if (*b.shape[:-1], a.shape[-1]) != shapes[path]:
            ours = [*b.shape[:-1], a.shape[-1]]
            raise ValueError(f"{refusal}: for {path} it is {ours}, the base {list(shapes[path])}")
    wanted = {path for path, shape in shapes.items() if _is_targeted(adapter, path, experts=len(shape) == 3)}
    if missing := sorted(wanted - set(adapter.modules)):
        raise ValueError(f"{refusal}: it lacks {_some(missing)}, which its adapter_config.json targets")


def _check_family(adapter: Adapter, model_type: str, refusal: str) -> None:
    """Compare PEFT's `auto_mapping`, where it names a class such as `Qwen3ForCausalLM`, with the base's family."""
    mapping = adapter.peft.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    expected = "".join(part.capitalize() for part in model_type.split("_")) + _CLASS
    if isinstance(name, str) and name.endswith(_CLASS) and name != expected:
        raise ValueError(f"{refusal}: it adapts a {name}, the base is of {model_type}")


def _is_targeted(adapter: Adapter, path: str, *, experts: bool) -> bool:
    """Tell whether PEFT would adapt the module of this path."""
    if experts:
        return _names(adapter.peft.get("target_parameters") or [], path)
    excluded = adapter.peft.get("exclude_modules")
    if excluded and _names(excluded, path):
        return False
    targets = adapter.peft.get("target_modules") or adapter.config.targets
    return targets == ALL_LINEAR or _names(targets, path)


def _names(targets: Any, path: str) -> bool:
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, path) is not None
        except re.error as error:
            raise ValueError(f"adapter_config.json: {targets!r:.100} is not a regular expression: {error}") from None
    return any(is_target(path, target) for target in targets)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
