"""Identity of a base model, recorded in its adapters, so that none is put on another base."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.fingerprint import digest_tensors
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig

_UNQUANTIZED = ("norm.weight", ".bias", ".sinks", "embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that every storage format keeps as they are."""
_COPY_OF_TIED = "lm_head.weight"
_NUMBER = re.compile(r"^\d+\.")
"""Of an expert, in the name of its own tensor."""
_EXPERTS = ".experts."
"""In names of tensors that folders lay out in several ways."""

Identity = Mapping[str, str]
"""`model_type`, and digests: `weights` of tensors that stay unquantized, `experts`, and `linears` of the others.

`settings` change a model's outputs with the same tensors; `storage` and `expert_storage` are the formats of `linears`
and `experts`.
"""


def identify(folder: str | Path) -> Identity:
    """Return the identity of a base model's folder, from samples of its tensors in bfloat16.

    The folder's dtype and the copy of a tied embedding make no difference; a quantized copy differs in `storage` and
    `linears` alone, other layouts of its experts in `expert_storage` and `experts`.

    Raises:
        ValueError: a bad folder.
    """
    raw, files = read_config(folder), open_checkpoint(folder)
    tied = {_COPY_OF_TIED} if raw.get("tie_word_embeddings") else set()
    names = files.tensors.keys() - tied
    experts = {name for name in names if _EXPERTS in name}
    kept = {name for name in names - experts if name.endswith(_UNQUANTIZED)}
    linears = names - experts - kept
    identity = {
        "model_type": str(raw.get("model_type")),
        "settings": _settings(config_from_hf(raw)),
        "weights": digest_tensors(files, kept, any_float=True),
        "linears": digest_tensors(files, linears, any_float=True),
        "storage": _storage(files, linears),
    }
    if experts:
        layout = sorted({_NUMBER.sub("", name.partition(_EXPERTS)[2]) for name in experts})
        identity["experts"] = digest_tensors(files, experts, any_float=True)
        identity["expert_storage"] = f"{_storage(files, experts)}: {', '.join(layout)}"
    return identity


def identify_random(config: DecoderConfig, seed: int) -> Identity:
    """Return the identity of random weights: they follow from shape and seed."""
    shape = hashlib.sha256(repr(replace(config, quantize="none")).encode()).hexdigest()[:16]
    return {"model_type": config.model_type, "weights": f"random {seed} {shape}"}


def difference(recorded: Identity, found: Identity) -> str | None:
    """Describe how two identities differ; None if they are of one model, stored in whichever format."""
    names = ["model_type", "weights"]
    for digest, storage in (("linears", "storage"), ("experts", "expert_storage")):
        if recorded.get(storage) == found.get(storage):
            names.append(digest)
    for name in names:
        if recorded.get(name) != found.get(name):
            return f"{name} {recorded.get(name)} was recorded, this base has {found.get(name)}"
    return None


def changed_settings(recorded: Identity, found: Identity) -> str | None:
    """Describe how the settings of two bases differ; None if they do not, or were not recorded."""
    before, now = recorded.get("settings"), found.get("settings")
    return None if before is None or now is None or before == now else f"{before} was recorded, this base has {now}"


def _settings(config: DecoderConfig) -> str:
    """Return the settings that change a model's outputs with the same tensors."""
    rope = {f.name: value for f in fields(config.rope) if (value := getattr(config.rope, f.name)) != f.default}
    values: dict[str, object] = {"rms_norm_eps": config.rms_norm_eps, "rope": rope}
    if any(config.layer_windows):
        values["layer_windows"] = config.layer_windows
    if config.moe:
        values |= {name: getattr(config.moe, name) for name in ("num_experts_per_tok", "norm_topk_prob")}
    return json.dumps(values)


def _storage(files: TensorFiles, names: set[str]) -> str:
    """Return the integer dtypes among tensors."""
    dtypes = sorted({str(files.tensors[name].dtype) for name in names if files.tensors[name].dtype.kind in "iub"})
    return "+".join(dtypes) or "unquantized"
