"""A model family in a file of the user's, compared with transformers."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors import safe_open

from jaxglue.hf.loading import load_model
from jaxglue.models import FAMILIES
from tests.goldens.drawn import unpacked
from tests.models.test_family_goldens import GOLDENS, write_folder
from tests.models.test_parity import assert_parity

FOLDER = Path(__file__).parent


@pytest.fixture
def cohere():
    """Register the family of `family.py` for one test."""
    with FAMILIES.scope():
        exec(compile((FOLDER / "family.py").read_text(), "family.py", "exec"), {"__name__": "family"})
        yield


def test_logits_loss_and_gradients_of_a_family_of_a_file_match_transformers(cohere, tmp_path):
    with safe_open(GOLDENS / "parts" / "cohere.safetensors", "numpy") as file:
        raw, tensors = json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert_parity(load_model(write_folder(tmp_path, raw), dtype=jnp.float32), unpacked(tensors), nnx.Param)
