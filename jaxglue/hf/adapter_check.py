"""The check of an adapter against a base, by one rule for training, generation and export."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxglue.data.limits import pattern_time_limit
from jaxglue.hf.adapter import Adapter
from jaxglue.hf.adapter_config import matching
from jaxglue.hf.identity import Identity, changed_settings, difference
from jaxglue.models.lora_config import ALL_LINEAR, PATHS, is_target
from jaxglue.models.vocabulary import ROWS
from jaxglue.models.wrapper import from_text_name, is_beside_text, to_module_name, to_text_name

_SHOWN = 3
"""Names that a message lists."""
_CLASS = "ForCausalLM"
_log = logging.getLogger(__name__)


def check_adapter(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], base: Identity, name: str) -> Adapter:
    """Refuse an adapter that was trained on another base, or that lacks a module it targets; return it fitted.

    Fitted to a base that ties its output projection to the embedding, an adapter holds the embedding once.

    An adapter that records no base, as PEFT's do not, is reported and checked by names and shapes alone.

    Args:
        adapter: of a folder.
        shapes: of the base's linear layers, embedding and, unless tied to it, output projection (`base_shapes`).
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
    elif changed := changed_settings(adapter.base, base):
        _log.warning("%s was trained on other settings of its base: %s", adapter.folder, changed)
    _check_family(adapter, base["model_type"], refusal)
    if extra := sorted(set(adapter.modules) - shapes.keys()):
        raise ValueError(f"{refusal}: it adapts {_some(extra)}, missing from the base")
    for path in adapter.modules:
        a, b = (adapter.tensors[f"{path}.{matrix}"] for matrix in ("lora_A", "lora_B"))
        ours = [*b.shape[:-1], a.shape[-1]]
        if path == PATHS["embed_tokens"]:
            ours = ours[::-1]
        if ours != list(shapes[path]):
            raise ValueError(f"{refusal}: for {path} it is {ours}, the base {list(shapes[path])}")
    vocabulary = {path: shape for path, shape in shapes.items() if path in PATHS.values()}
    linears = {path: shape for path, shape in shapes.items() if path not in vocabulary}
    with matching(adapter.folder):
        modules = {path: to_module_name(path, base["model_type"]) for path in shapes}
        wanted = {path for path in shapes if _is_targeted(adapter, modules[path], experts=len(shapes[path]) == 3)}
    # Adapters of a tower that learned nothing are left out.
    if missing := sorted(path for path in wanted - set(adapter.modules) if not is_beside_text(path)):
        raise ValueError(f"{refusal}: it lacks {_some(missing)}, which its adapter_config.json targets")
    if ignored := sorted(set(adapter.modules) - wanted):
        raise ValueError(f"{refusal}: it holds {_some(ignored)}, which its adapter_config.json does not target")
    if any(is_target(path, target) for target in adapter.config.targets for path in linears.keys() - adapter.modules):
        # Experts alone, where dense layers' modules have their names.
        adapter = replace(adapter, config=replace(adapter.config, targets=tuple(sorted(adapter.modules))))
    fitted = adapter if PATHS["lm_head"] in vocabulary else fit_tied(adapter)
    _check_vocabulary(fitted, vocabulary, refusal)
    return fitted


def fit_tied(adapter: Adapter) -> Adapter:
    """Return an adapter without the copies that it holds of a tied embedding.

    Raises:
        ValueError: the output projection differs from the embedding.
    """
    tensors = dict(adapter.tensors)
    for last in ("weight", ROWS):
        embedding, head = (tensors.get(f"{path}.{last}") for path in PATHS.values())
        if head is not None and (embedding is None or not np.array_equal(embedding, head)):
            raise ValueError(
                f"{adapter.folder} trains rows of lm_head apart from the embedding to which its base ties it, which is "
                "not supported: train the same rows of embed_tokens, or whole matrices (modules_to_save)"
            )
        tensors.pop(f"{PATHS['lm_head']}.{last}", None)
    modules = tuple(module for module in adapter.config.modules_to_save if module != "lm_head")
    return replace(adapter, tensors=tensors, config=replace(adapter.config, modules_to_save=modules))


def _check_vocabulary(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], refusal: str) -> None:
    """Raise ValueError unless embedding and output projection fit the base, whose vocabulary they may enlarge."""
    grown, indices = adapter.vocab_size, set(adapter.config.trainable_token_indices)
    for path, (rows, width) in shapes.items():
        whole, single = (adapter.tensors.get(f"{path}.{last}") for last in ("weight", ROWS))
        for tensor in (whole, single):
            if tensor is not None and tensor.shape[1] != width:
                raise ValueError(f"{refusal}: for {path} it has rows of {tensor.shape[1]}, the base {width}")
        if whole is not None and len(whole) < max(rows, grown):
            raise ValueError(f"{refusal}: for {path} it has {len(whole)} rows, expected {max(rows, grown)}")
        added = set(range(rows, grown))
        if whole is None and not added <= (indices if single is not None else set()):
            raise ValueError(f"{refusal}: it needs {grown} tokens, the base has {rows}, and it lacks rows of {path}")


def _check_family(adapter: Adapter, model_type: str, refusal: str) -> None:
    """Compare PEFT's `auto_mapping`, where it names a class such as `Qwen3ForCausalLM`, with the base's family."""
    mapping = adapter.peft.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    expected = model_type.removesuffix("_text").replace("_", "")
    if not isinstance(name, str) or not name.endswith(_CLASS):
        return
    if name.removesuffix(_CLASS).replace("_", "").lower() != expected:
        raise ValueError(f"{refusal}: it adapts a {name}, the base is of {model_type}")


def _is_targeted(adapter: Adapter, path: str, *, experts: bool) -> bool:
    """Tell whether PEFT would adapt the module of this path."""
    path = from_text_name(path, adapter.text_path)
    parameters = adapter.peft.get("target_parameters") or []
    if experts:
        return _names(parameters, path)
    if _names(parameters, f"{path}.weight"):
        return True
    excluded = adapter.peft.get("exclude_modules")
    if excluded and _names(excluded, path):
        return False
    targets, compared = adapter.peft.get("target_modules"), path
    if targets is None:  # PEFT's own names of the family's modules
        targets, compared = adapter.config.targets, to_text_name(path)[0]
        targets = () if adapter.peft.get("target_parameters") else targets
    if targets == ALL_LINEAR:
        return path not in (from_text_name(each, adapter.text_path) for each in PATHS.values())
    return _names(targets, compared)


def _names(targets: Any, path: str) -> bool:
    if isinstance(targets, str):
        try:
            with pattern_time_limit():
                return re.fullmatch(targets, path) is not None
        except re.error as error:
            raise ValueError(f"adapter_config.json: {targets!r:.100} is not a regular expression: {error}") from None
    return any(is_target(path, target) for target in targets)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
