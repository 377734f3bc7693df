"""Identity of a base model, recorded in its adapters so that none is put on another base, and digests of weights.

Checkpoints are too large to read, so large tensors are sampled.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig, Mixer, describe_as_earlier
from jaxglue.models.wrapper import text_config

_WHOLE = 4096
"""Elements of a tensor that is read whole."""
_PLACES, _ELEMENTS = 4, 256
"""Places read of a larger one, evenly spaced, and elements at each: rows, or parts of a row of three or more axes."""


def weights_digest(folder: str | Path) -> str:
    """Return 16 hexadecimal digits of every tensor's name, shape, dtype and sampled values."""
    files = open_checkpoint(folder)
    return digest_tensors(files, files.tensors)


def digest_tensors(files: TensorFiles, names: Iterable[str], *, any_float: bool = False) -> str:
    """Return 16 hexadecimal digits of tensors' names, shapes, dtypes and sampled values.

    Args:
        files: that hold the tensors.
        names: of the tensors, in any order.
        any_float: digest floating-point values as bfloat16, whichever dtype they are stored in.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        info = files.tensors[name]
        rounds = any_float and info.dtype.kind not in "iub"
        digest.update(f"{name} {info.shape} {'float' if rounds else info.dtype}".encode())
        values = _sample(files, name)
        digest.update((values.astype(ml_dtypes.bfloat16) if rounds else values).tobytes())
    return digest.hexdigest()[:16]


def _sample(files: TensorFiles, name: str) -> np.ndarray:
    shape = files.tensors[name].shape
    if prod(shape) <= _WHOLE:
        return files.read(name)
    if len(shape) > 2:
        places = np.unique(np.linspace(0, prod(shape[:-1]) - 1, _PLACES).astype(int))
        return np.concatenate([files.read_line(name, np.unravel_index(place, shape[:-1])) for place in places])
    rows = ceil(_ELEMENTS / prod(shape[1:]))
    starts = np.linspace(0, max(0, shape[0] - rows), _PLACES).astype(int)
    return np.concatenate([files.read_rows(name, start, start + rows).reshape(-1) for start in starts])


_UNQUANTIZED = ("norm.weight", ".bias", ".sinks", "embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that every storage format keeps as they are."""
_COPY_OF_TIED = "lm_head.weight"
_NUMBER = re.compile(r"^\d+\.")
"""Number of an expert, in the name of its own tensor."""
_EXPERTS = ".experts."
"""Part of the names of tensors that folders lay out in several ways."""

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
    tied = {_COPY_OF_TIED} if text_config(raw).get("tie_word_embeddings") else set()
    names = files.tensors.keys() - tied
    experts = {name for name in names if _EXPERTS in name}
    kept = {name for name in names - experts if name.endswith(_UNQUANTIZED)}
    linears = names - experts - kept
    identity = {
        "model_type": str(text_config(raw).get("model_type")),
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
    shape = hashlib.sha256(describe_as_earlier(repr(replace(config, quantize="none"))).encode()).hexdigest()[:16]
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
    values |= {name: repr(value) for name, value in _changed(config).items()}
    if config.moe:
        values |= {name: getattr(config.moe, name) for name in ("num_experts_per_tok", "norm_topk_prob")}
        routed = (f for f in fields(config.moe) if f.name in ("groups", "routed_scale"))
        values |= {f.name: value for f in routed if (value := getattr(config.moe, f.name)) != f.default}
    return json.dumps(values)


def _changed(config: DecoderConfig) -> dict[str, object]:
    """Return further settings that change a model's outputs where they are not the defaults, as adapters record them.

    Names and order are those of all versions.
    """
    named: dict[str, tuple[object, object]] = {
        "layer_ropes": (config.layer_ropes, ()),
        "activation": (config.activation, "silu"),
        "attention_scale": (config.attention.scale, None),
        "attention_softcap": (config.attention.softcap, None),
        "embedding_multiplier": (config.scales.embedding, 1.0),
        "residual_multiplier": (config.scales.residual, 1.0),
        "logit_divisor": (config.scales.logit_divisor, 1.0),
        "logit_softcap": (config.scales.logit_softcap, None),
    }
    values = {name: value for name, (value, default) in named.items() if value != default}
    values |= {} if config.family_shape is None else config.family_shape.recorded
    recorded = [mixer for mixer in config.mixer_kinds if mixer.record]
    return values | {mixer.record: _RecordedMixer(mixer, config.mixers) for mixer in recorded if mixer.record}


class _RecordedMixer(NamedTuple):
    """A mixer and the layers that have it, in an adapter's record."""

    mixer: Mixer
    layers: tuple[Mixer, ...]

    def __repr__(self) -> str:
        return f"{repr(self.mixer)[:-1]}, layers={tuple(mixer == self.mixer for mixer in self.layers)})"


def _storage(files: TensorFiles, names: set[str]) -> str:
    """Return the integer dtypes among tensors."""
    dtypes = sorted({str(files.tensors[name].dtype) for name in names if files.tensors[name].dtype.kind in "iub"})
    return "+".join(dtypes) or "unquantized"
