"""EAGLE-3 heads against their published definition (golden by goldens/make_eagle.py), and in files."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import repeat

from jaxglue.hf.eagle import load_eagle, new_shape, open_eagle, write_eagle
from jaxglue.hf.loading import load_model
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.decoder import packed_context
from jaxglue.models.draft import parameter_name
from jaxglue.models.eagle import default_taps, why_no_eagle
from jaxglue.models.parameters import hf_name
from tests.eagle_folders import write_head
from tests.goldens.drawn import drawn
from tests.models.test_draft import packed_batch
from tests.models.test_family_goldens import GOLDENS

SHAPE = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 4, "model_type": "llama"}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SHAPE |= {"rope_theta": 100.0, "rms_norm_eps": 1e-5}
WORDS = [1, 2, 5, 6, 7, 11, 12, 13, 17, 20, 23]


@pytest.fixture
def drawn_model(tmp_path):
    """A folder of a small Llama with drawn weights, and its model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    model = nnx.eval_shape(lambda: build_model(config_from_hf(SHAPE), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    names = {hf_name(".".join(map(str, path))): v.shape for path, v in nnx.to_flat_state(nnx.state(model))}
    save_file({name: drawn(name, shape) for name, shape in names.items()}, folder / "model.safetensors")
    return folder, load_model(folder, dtype=jnp.float32)


def read_states(model, batch, taps):
    """Return the inputs of some of a model's layers, and its last output."""
    x, context, read = model.embed_tokens(batch.tokens, jnp.float32), packed_context(model.config, batch.segments), []
    for index, layer in enumerate(model.layers):
        read += [x] if index in taps else []
        x = layer(x, context)
    return tuple(read), x


@pytest.mark.parametrize("before", [False, repeat(True)])
def test_drafts_are_those_of_the_definition(before, drawn_model, tmp_path):
    folder, model = drawn_model
    golden = load_file(GOLDENS / "drafts/eagle.safetensors")
    write_head(tmp_path / "head", folder, model.config, WORDS, norm_before_residual=before)
    head, matrix, tokens = load_eagle(found := open_eagle(tmp_path / "head", folder, model.config), jnp.float32)
    assert tokens == WORDS and found.shape.taps == (0, 2, 3) and found.shape.norm_before_residual == before
    batch = packed_batch(golden["tokens"], [golden["lengths"]])

    @jax.jit
    def run():
        read, _ = read_states(model, batch, found.shape.taps)
        embedded = model.embed_tokens(jnp.roll(batch.tokens, -1, axis=1), jnp.float32)
        states = head(embedded, head.combine(read), packed_context(model.config, batch.segments))
        return head.output(states) @ matrix.T

    followed = batch.loss_weights > 0
    expected = golden[f"logits.0.{'before' if before else 'after'}"]
    np.testing.assert_allclose(np.asarray(run())[followed], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("words", [WORDS, None])
def test_a_head_is_written_as_it_is_read(words, drawn_model, tmp_path):
    folder, model = drawn_model
    stored = write_head(tmp_path / "head", folder, model.config, words, start="layers.0.", norm_before_residual=False)
    head, matrix, tokens = load_eagle(found := open_eagle(tmp_path / "head", folder, model.config), jnp.float32)
    parameters = {parameter_name(path): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(head))}
    values = found.shape, parameters, np.asarray(matrix), tokens
    write_eagle(tmp_path / "new", folder, *values, drafts=2, name="a/b")
    written = load_file(tmp_path / "new/model.safetensors")
    assert written.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
        assert written[name].dtype == value.dtype
    assert open_eagle(tmp_path / "new", folder, model.config).shape == found.shape
    raw = json.loads((tmp_path / "new/config.json").read_text())
    assert raw["draft_vocab_size"] == (len(WORDS) if words else 24) and raw["norm_before_residual"] is False
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "a/b"


def test_folders_of_other_heads_are_refused(drawn_model, tmp_path):
    folder, model = drawn_model
    stored = write_head(tmp_path / "head", folder, model.config, WORDS)
    path, file = tmp_path / "head/model.safetensors", tmp_path / "head/config.json"
    cases = {
        "lacks midlayer.hidden_norm.weight": {"midlayer.hidden_norm.weight": None},
        r"fc.weight in .* is \[16, 32\]: a head of this model has \[16, 48\]": {"fc.weight": np.ones((16, 32), "f4")},
        "layers.1.mlp.up_proj.weight .* belongs to no": {"layers.1.mlp.up_proj.weight": np.ones(3, "f4")},
        "rising tokens below 24": {"d2t": np.zeros(11, np.int64) + 20},
        "heads read the model's embedding": {"embed_tokens.weight": np.zeros((24, 16), "f4")},
    }
    for message, change in cases.items():
        save_file({name: value for name, value in (stored | change).items() if value is not None}, path)
        with pytest.raises(ValueError, match=message):
            open_eagle(tmp_path / "head", folder, model.config)
    raw = json.loads(file.read_text())
    cases = {
        "lacks draft_vocab_size": {"draft_vocab_size": None},
        "of the kind 'peagle'": {"speculators_model_type": "peagle"},
        "norm_before_fc is not supported": {"norm_before_fc": True},
        "one Llama layer": {"num_hidden_layers": 2},
        "head_dim is 4, and the model's 8": {"head_dim": 4},
        "three of the model's 4 layers": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    for message, change in cases.items():
        file.write_text(json.dumps({name: value for name, value in (raw | change).items() if value is not None}))
        with pytest.raises(ValueError, match=message):
            open_eagle(tmp_path / "head", folder, model.config)


def test_models_that_no_head_is_for_are_refused_with_the_reason(tiny_model):
    config = tiny_model("qwen3").config
    assert why_no_eagle(config) is None and default_taps(36) == (2, 18, 33)
    shape = new_shape({"rope_theta": 5e5}, config)
    assert shape.layer.rope.rope_theta == 5e5 and shape.taps == (0, 1, 2)
    cases = {
        "layers": config.with_layers([0, 1]),
        "scaled": replace(config, scales=replace(config.scales, embedding=2.0)),
    }
    cases |= {"convolution": tiny_model("lfm2", layer_types=["conv"] * 3, conv_L_cache=3).config}
    for reason, each in cases.items():
        with pytest.raises(ValueError, match=f"the model has .*{reason}"):
            new_shape({}, each)
