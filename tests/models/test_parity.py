"""Models compared with transformers and PEFT, each golden's documents packed into one row."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxglue.hf.adapter_tensors import from_peft
from jaxglue.hf.loading import add_adapter, load_model, set_adapter
from jaxglue.models.lora import add_lora
from jaxglue.models.parameters import hf_name
from jaxglue.ops.segments import pack_segments
from tests.goldens.drawn import probes, unpacked
from tests.selection import repeat, repeats

GOLDENS = Path(__file__).parents[1] / "goldens"
DENSE = ["qwen3_tied", "qwen3_window_bias", "llama_tied_llama3", "llama_yarn", "llama_bias_no_groups"]
MODELS = [*DENSE, "qwen3_5", "qwen3_moe", "qwen3_moe_mixed", "gpt_oss"]
PADDING = 3


def packed_row(golden):
    tokens = np.pad(golden["tokens"], (0, PADDING))[None]
    return tokens, pack_segments([golden["lengths"].tolist()], seq_len=tokens.shape[1])


@nnx.jit
def forward(model, tokens, segments):
    return model(tokens, segments)


@nnx.jit(static_argnums=3)
def loss_and_gradients(model, tokens, segments, trainable):
    """Return ((mean cross-entropy, logits), gradients) of next-token prediction within documents."""

    def mean_loss(model):
        logits = model(tokens, segments)
        predicted = (segments.ends - 1 > jnp.arange(tokens.shape[1])) & (segments.segment_ids > 0)
        taken = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1)[..., None], axis=-1)[..., 0]
        return -jnp.where(predicted, taken, 0).sum() / predicted.sum(), logits

    return nnx.value_and_grad(mean_loss, argnums=nnx.DiffState(0, trainable), has_aux=True)(model)


PEFT = {
    **{"dora_rows": "qwen3_window_bias", "whole": "qwen3_window_bias", "whole_tied": "qwen3_tied"},
    **dict.fromkeys(("untied", "untied_both", "untied_head"), "qwen3_tied"),
    **{"vocabulary": "qwen3_window_bias", "vocabulary_tied": "qwen3_tied", "vocabulary_untied": "qwen3_tied"},
}
"""Base of each adapter in goldens/peft."""


@pytest.mark.parametrize("name", repeats(PEFT, *({*PEFT} - {"dora_rows", "vocabulary_tied"})))
def test_adapters_saved_by_peft_give_its_logits_and_gradients(name):
    folder, base = GOLDENS / "peft" / name, GOLDENS / PEFT[name]
    golden, inferring = load_file(folder / "golden.safetensors"), load_model(base, dtype=jnp.float32)
    adapter = add_adapter(inferring, folder)
    assert_logits(inferring, golden)
    training = load_model(base, dtype=jnp.float32, untied=not inferring.config.tie_word_embeddings)
    add_lora(training, adapter.config, rngs=nnx.Rngs(0))
    set_adapter(training, adapter)
    assert_parity(training, golden, nnx.LoRAParam)


def golden_gradients(golden, rank):
    """Return golden gradients by internal name, in internal shape."""
    gradients = {name.removeprefix("grad."): array for name, array in golden.items() if name.startswith("grad.")}
    plain = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): array
        for name, array in gradients.items()
    }
    experts = ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")
    return dict(from_peft(name, array, experts, rank) or (name, array) for name, array in plain.items())


def assert_logits(model, golden):
    logits = forward(model, *packed_row(golden))[0, :-PADDING]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


def assert_parity(model, golden, trainable=nnx.Param, rank=1):
    (loss, logits), state = loss_and_gradients(model, *packed_row(golden), trainable)
    np.testing.assert_allclose(logits[0, :-PADDING], golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    gradients = {hf_name(".".join(map(str, path))): np.asarray(g[...]) for path, g in nnx.to_flat_state(state)}
    norms = {key.removeprefix("norm."): norm for key, norm in golden.items() if key.startswith("norm.")}
    expected = golden_gradients(golden, rank)
    assert gradients.keys() == (norms or expected).keys()
    for name, gradient in gradients.items():
        if norms:
            norm, difference = norms[name], probes(name, gradient) - golden[f"probes.{name}"]
            np.testing.assert_allclose(np.linalg.norm(gradient), norm, rtol=1e-3, err_msg=name)
        else:
            norm, difference = np.linalg.norm(expected[name]), gradient - expected[name]
        error = np.linalg.norm(difference) / norm
        assert error <= 1e-3, f"{name}: {error:.1e}"


def assert_folder_parity(folder):
    assert_parity(load_model(folder, dtype=jnp.float32), unpacked(load_file(folder / "golden.safetensors")))


@pytest.mark.parametrize("name", repeats(MODELS, "qwen3_moe", "qwen3_window_bias", "qwen3_tied", "llama_yarn"))
def test_logits_loss_and_gradients_match_transformers(name):
    assert_folder_parity(GOLDENS / name)


@pytest.mark.parametrize(
    ("base", "adapter", "golden"),
    [
        ("qwen3_tied", "adapter", "adapter.safetensors"),
        repeat("qwen3_moe", "qwen3_moe_adapter", "qwen3_moe_adapter/golden.safetensors"),
        ("gpt_oss", "gpt_oss_adapter", "gpt_oss_adapter/golden.safetensors"),
    ],
)
def test_adapter_logits_loss_and_gradients_match_peft(base, adapter, golden):
    model = load_model(GOLDENS / base, dtype=jnp.float32)
    config = add_adapter(model, GOLDENS / adapter).config
    assert_parity(model, load_file(GOLDENS / golden), nnx.LoRAParam, config.rank)


@pytest.mark.parametrize(
    "name", ["qwen3_window_bias", *map(repeat, ("qwen3_5", "llama_tied_llama3", "qwen3_moe_mixed", "gpt_oss"))]
)
def test_packed_row_equals_its_documents_one_by_one(name):
    model, golden = load_model(GOLDENS / name, dtype=jnp.float32), load_file(GOLDENS / name / "golden.safetensors")
    lengths = golden["lengths"].tolist()
    alone = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, document in zip(alone, np.split(golden["tokens"], np.cumsum(lengths)[:-1]), strict=True):
        row[: len(document)] = document
    one_by_one = forward(model, alone, pack_segments([[length] for length in lengths], seq_len=max(lengths)))
    expected = np.concatenate([logits[:length] for logits, length in zip(one_by_one, lengths, strict=True)])
    packed = forward(model, *packed_row(golden))[0, :-PADDING]
    np.testing.assert_allclose(packed, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("script", ["make_models", "make_moe", "make_qwen3_5"])
def test_live_models_match_transformers(script, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(GOLDENS)
    goldens = importlib.import_module(script)
    for seed, (name, config) in enumerate(goldens.MODELS.items(), start=100):
        goldens.make(tmp_path / name, config, seed)
        assert_folder_parity(tmp_path / name)
