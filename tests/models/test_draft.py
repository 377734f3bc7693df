"""Draft heads against their published definition (goldens by goldens/make_drafts.py), and in packed rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import repeat, repeats, repeats_parts_of

from jaxglue.data.batch import Batch
from jaxglue.engine.head_values import HeadValues
from jaxglue.hf.draft import find_draft, head_modules, load_draft, published_tensors
from jaxglue.hf.export import unquantized_modules
from jaxglue.hf.loading import load_model
from jaxglue.models.decoder import packed_context
from jaxglue.models.draft import parameter_name
from jaxglue.ops.segments import pack_segments
from jaxglue.training.draft import drafted_batch, merged_parameters
from tests.draft_folders import add_draft
from tests.goldens.drawn import probes, unpacked
from tests.models.test_family_goldens import GOLDENS, read_golden, write_folder

NAMES = "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "deepseek_v3"


def packed_batch(tokens, rows):
    """Documents of these lengths in rows, every next token of which counts."""
    tokens = np.asarray(tokens, np.int32).reshape(len(rows), -1)
    segments = pack_segments([list(map(int, lengths)) for lengths in rows], seq_len=tokens.shape[1])
    predicted = segments.ends - 1 > np.arange(tokens.shape[1])
    targets = np.where(predicted, np.roll(tokens, -1, axis=1), 0)
    return Batch(tokens=tokens, targets=targets, loss_weights=predicted.astype(np.float32), segments=segments)


def runner(model, head):
    """Return a function of a batch: the logits of drafts [B, T, V], their mean loss, and its gradients by name."""
    modules = nnx.split(model), nnx.split(head, nnx.Param, ...)

    @jax.jit
    def run(weights, parameters, others, batch):
        model, drafted = nnx.merge(modules[0][0], weights), drafted_batch(batch)
        x, context = model.embed_tokens(batch.tokens, jnp.float32), packed_context(model.config, batch.segments)
        for layer in model.layers:
            x = layer(x, context)
        hidden, embedded = model.norm(x), model.embed_tokens(drafted.tokens, jnp.float32)

        def loss(parameters):
            out = nnx.merge(modules[1][0], parameters, others)(embedded, hidden, context)
            values = HeadValues(out.reshape(-1, out.shape[-1]), model.lm_head, drafted, softcap=None)
            return values.cross_entropy / drafted.loss_weights.sum(), out @ model.output_weight.T

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        return logits, value, gradients

    def named(batch):
        logits, value, gradients = run(modules[0][1], *modules[1][1:], batch)
        flat = nnx.to_flat_state(gradients)
        return np.asarray(logits), float(value), {parameter_name(path): each[...] for path, each in flat}

    return named


@pytest.mark.parametrize("name", repeats(NAMES, *NAMES[1:3]))
def test_logits_loss_and_gradients_are_those_of_the_definition(name, tmp_path):
    raw, tokens = read_golden(name)
    folder = write_folder(tmp_path, raw)
    add_draft(folder, apart=name == "deepseek_v3")
    model, golden = load_model(folder, dtype=jnp.float32), unpacked(load_file(GOLDENS / f"drafts/{name}.safetensors"))
    batch = packed_batch(tokens["tokens"], [tokens["lengths"]])
    logits, loss, gradients = runner(model, load_draft(folder, model.config, dtype=jnp.float32))(batch)
    np.testing.assert_allclose(logits[batch.loss_weights > 0], golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    assert {f"norm.{path}" for path in gradients} == {key for key in golden if key.startswith("norm.")}
    for path, gradient in gradients.items():
        distance = np.linalg.norm(probes(path, np.asarray(gradient)) - golden[f"probes.{path}"])
        assert distance <= 1e-3 * golden[f"norm.{path}"], path


@repeats_parts_of("test_logits_loss_and_gradients_are_those_of_the_definition")
@pytest.mark.parametrize("name", [repeat("qwen3_next"), "glm4_moe"])
def test_a_draft_looks_over_no_documents_end(name, tmp_path):
    raw, _ = read_golden(name)
    folder, rng, lengths = write_folder(tmp_path, raw), np.random.default_rng(0), (1, 2, 3, 9)
    add_draft(folder)
    model = load_model(folder, dtype=jnp.float32)
    run, size = runner(model, load_draft(folder, model.config, dtype=jnp.float32)), model.config.vocab_size
    row, starts = rng.integers(0, size, sum(lengths)), np.cumsum((0, *lengths))
    packed = run(packed_batch(row, [lengths]))[0][0]
    documents = np.split(row, starts[1:-1])
    padded = [np.pad(document, (0, max(lengths) - len(document))) for document in documents]
    apart = run(packed_batch(padded, [(length,) for length in lengths]))[0]
    for start, length, alone in zip(starts, lengths, apart, strict=False):
        drafts = slice(start, start + length - 1)
        changed = rng.integers(0, size, len(row))
        changed[start : start + length] = row[start : start + length]
        np.testing.assert_array_equal(packed[drafts], run(packed_batch(changed, [lengths]))[0][0][drafts])
        np.testing.assert_allclose(packed[drafts], alone[: length - 1], rtol=0, atol=1e-5 * np.abs(packed).max())
    weights = drafted_batch(packed_batch(row, [lengths])).loss_weights
    assert float(weights.sum()) == sum(max(length - 2, 0) for length in lengths)


@pytest.mark.parametrize("apart", [True, repeat(False)])
def test_a_head_is_written_as_it_was_read(apart, tmp_path):
    raw, _ = read_golden("deepseek_v3")
    folder = write_folder(tmp_path, raw)
    stored = add_draft(folder, apart=apart)
    config = load_model(folder, dtype=jnp.float32).config
    parameters = merged_parameters(load_draft(folder, config, dtype=jnp.float32))
    written = published_tensors(folder, config, {name: np.asarray(value) for name, value in parameters.items()})
    assert written.keys() == {name for name in stored if "embed_tokens" not in name and "shared_head.head" not in name}
    for name, value in written.items():
        np.testing.assert_array_equal(value, stored[name], err_msg=name)


def test_folders_without_a_head_and_with_others_are_refused(tmp_path):
    raw, _ = read_golden("glm4_moe")
    folder = write_folder(tmp_path, raw)
    config = load_model(folder, dtype=jnp.float32).config
    with pytest.raises(ValueError, match="holds no draft head"):
        find_draft(folder, config)
    with pytest.raises(ValueError, match="llama has no draft head here"):
        find_draft(folder, replace(config, model_type="llama"))
    stored, path = add_draft(folder), folder / "model.safetensors"
    whole = load_file(path)
    cases = {
        "lacks model.layers.2.enorm.weight": {"model.layers.2.enorm.weight": None},
        r"is \[3\], config.json says \[16\]": {"model.layers.2.enorm.weight": np.ones(3, np.float32)},
        "belongs to no draft head of one layer": {"model.layers.2.other.weight": np.ones(3, np.float32)},
        "a vocabulary of their own": {"model.layers.2.embed_tokens.weight": whole["model.embed_tokens.weight"] + 1},
    }
    assert stored.keys() < whole.keys()
    for message, change in cases.items():
        save_file({name: value for name, value in (whole | change).items() if value is not None}, path)
        with pytest.raises(ValueError, match=message):
            find_draft(folder, config)


LAYER = [f"self_attn.{name}_proj" for name in "qkvo"]


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen3_next", ["mtp.fc", *(f"mtp.layers.0.{part}" for part in LAYER)]),
        ("glm4_moe", ["model.layers.2.eh_proj", *(f"model.layers.2.{part}" for part in LAYER)]),
    ],
)
def test_quantized_folders_name_the_heads_modules_as_vllm_does(name, modules, tmp_path):
    raw, _ = read_golden(name)
    folder = write_folder(tmp_path, raw)
    config = load_model(folder, dtype=jnp.float32).config
    assert head_modules(folder, config) == []
    add_draft(folder, apart=True)
    found = head_modules(folder, config)
    assert {*modules} <= {*found} and all(".mlp." in each for each in {*found} - {*modules})
    assert unquantized_modules(config, folder) == ["lm_head", *found]
