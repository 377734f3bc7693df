"""Model folders with draft heads, under the names of published ones."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.draft import draft_shapes
from jaxglue.hf.experts import expert_parts
from jaxglue.models import config_from_hf
from jaxglue.models.draft import DRAFTS
from tests.goldens.drawn import drawn


def add_draft(folder: Path, *, apart: bool = False) -> dict[str, np.ndarray]:
    """Add a drawn head to a folder with weights in one file, experts one by one if `apart`; return its tensors."""
    config, model = config_from_hf(read_config(folder)), load_file(folder / "model.safetensors")
    names, head = DRAFTS[config.model_type].of(config.num_hidden_layers), {}
    for name, shape in draft_shapes(config).items():
        value = drawn(f"draft.{name}", shape)
        parts = expert_parts(name, shape) if apart else {}
        head |= {names.stored(part): value[index].copy() for part, index in (parts or {name: ()}).items()}
    head |= {copy: model[name] for copy, name in names.copies().items()}
    save_file(model | head, folder / "model.safetensors")
    return head
