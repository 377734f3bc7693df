"""Temperatures of decisions in a folder's weights, for servers that read label tokens and know no temperatures."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxglue.data.decide_rows import DecisionEncoder
from jaxglue.data.progress import DataProgress
from jaxglue.data.questions import TYPES, Labels
from jaxglue.files.atomic import atomic_folder, require_empty
from jaxglue.files.json_file import write_json
from jaxglue.hf.checkpoint import HEAD, open_checkpoint, read_config, stored_form, untie_files
from jaxglue.hf.export import copy_texts
from jaxglue.hf.files import MAX_SHARD_BYTES
from jaxglue.hf.reading import carry_record, read_record, write_record
from jaxglue.hf.serving import load_own_tokenizer
from jaxglue.hf.tensor_files import write_shards
from jaxglue.models import config_from_hf
from jaxglue.models.wrapper import with_text


def fold_temperatures(
    base: str | Path,
    output: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    progress: DataProgress | None = None,
) -> dict[str, float]:
    """Write a decision model whose logits of label tokens are divided by the temperatures fitted in training.

    The softmax over a question's labels is then calibrated for any reader. The output projection is written apart from
    the embedding, and other tokens' rows are unchanged. Returns the temperatures.

    Args:
        base: the model's folder, with its record (`jaxglue.hf.reading`).
        output: absent or empty; it appears complete or not at all.
        max_shard_bytes: shard limit in bytes.
        progress: shows the bytes written; by default nothing does.

    Raises:
        ValueError: a model without temperatures, with capped logits, or whose types of questions share labels.
    """
    base, output = Path(base), Path(output)
    require_empty(output)
    record, raw = read_record(base), read_config(base)
    temperatures = {name: float(value) for name, value in record.get("temperatures", {}).items()}
    if record.get("score"):
        raise ValueError(f"{base} answers by a head of its own, which other servers do not read: serve it here")
    if record.get("kind") != "decide" or not temperatures:
        raise ValueError(f"{base} has no temperatures: train decisions with --eval-data, and merge an adapter first")
    config = config_from_hf(raw)
    if config.scales.logit_softcap is not None:
        raise ValueError(f"{base} caps its logits, so that rows of its output projection scale none of them")
    labels = DecisionEncoder(load_own_tokenizer(base, None), system=record.get("system")).labels
    factors = label_factors(labels, temperatures)
    files = open_checkpoint(base).mapped()
    untie_files(base, files)
    specs = {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in files.tensors.items()}

    def read(name: str) -> np.ndarray:
        values = files.read(name)
        if name != HEAD:
            return values
        head = np.array(values)
        for token, factor in factors.items():
            head[token] = (head[token].astype(np.float32) * np.float32(factor)).astype(head.dtype)
        return head

    with atomic_folder(output) as temporary:
        copy_texts(base, temporary, specs)
        if config.tie_word_embeddings:
            untied = with_text(read_config(temporary), tie_word_embeddings=False) | {"tie_word_embeddings": False}
            write_json(temporary / "config.json", untied)
        carry_record(base, temporary)
        write_record(temporary, "decide", {**record, "temperatures": dict.fromkeys(temperatures, 1.0)})
        write_shards(temporary, *stored_form(base, specs, read), max_shard_bytes, progress)
    return temperatures


def label_factors(labels: Labels, temperatures: Mapping[str, float]) -> dict[int, float]:
    """Return the factor on the logit of each label token.

    Raises:
        ValueError: a token that answers questions of types with different temperatures.
    """
    found: dict[int, float] = {}
    for kind in TYPES:
        factor = 1 / temperatures.get(kind, 1.0)
        for token in (token for group in labels.groups[kind] for token in group):
            if found.setdefault(token, factor) != factor:
                raise ValueError("the tokenizer's labels of different types of questions are the same tokens")
    return found
