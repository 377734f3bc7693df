"""Adapters trained for a format in which their merge is served: exports hold what training computed."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeat, repeats_parts_of

from jaxglue.hf.adapter import Adapter, load_adapter, save_adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.export import quantize_folder, save_model
from jaxglue.hf.export_check import ROWS_FILE, ExportRows, first_rows, folder_parts, predict, random_rows
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.merge import MergedTensors, export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora, merge_served
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.segments import pack_segments

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
CONFIG = LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_config):
    """A folder of random weights in bfloat16."""
    raw = {**tiny_config, "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES}
    (source := tmp_path_factory.mktemp("base")).joinpath("config.json").write_text(json.dumps(raw))
    model = random_model(config_from_hf(raw), dtype=jnp.float32)
    save_model(source / "model", flatten_names(split_model(model, nnx.Param)[1]), source, dtype=jnp.bfloat16)
    return source / "model"


@pytest.fixture
def adapter(base, tmp_path):
    """Return a function that writes an adapter trained for a format, and rows of its run."""

    def write(served: str, std: float = 0.02) -> Adapter:
        config = config_from_hf(read_config(base))
        recorded = "none" if served == "none" else f"served_{served}"
        return written(base, config, tmp_path / "run/adapter", recorded, std=std)

    return write


@nnx.jit
def forward(model, tokens):
    return model(tokens)


def logits(folder, adapter=None, quantize="none"):
    config, rows = config_from_hf(read_config(folder)).quantized(quantize), random_rows(64)
    parts = folder_parts(folder, config, dtype=jnp.float32, adapter=adapter)
    return np.asarray(predict(config, parts, rows, jnp.dtype(jnp.float32)))


def written(folder, config, adapter, served, lora=CONFIG, std=0.02):
    """Write an adapter of random values that was trained on a folder for a format, and return it."""

    def made():
        model = random_model(config)
        add_lora(model, lora, rngs=nnx.Rngs(0))
        return model

    state = nnx.split(nnx.eval_shape(made), nnx.LoRAParam, ...)[1]
    names, rng = flatten_names(nnx.to_pure_dict(state)), np.random.default_rng(0)
    tensors = {name: rng.normal(size=spec.shape, scale=std).astype(np.float32) for name, spec in names.items()}
    tensors |= {name: 0.4 + x for name, x in tensors.items() if x.ndim == 1}  # magnitudes, about the rows' norms
    save_adapter(adapter, tensors, lora, str(folder), {**identify(folder), "quantize": served})
    return load_adapter(adapter)


MIXTURE = {
    **{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 1},
    **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_local_experts": 4},
}


@pytest.fixture
def mixture(tmp_path, tiny_config):
    """Return a function that writes a mixture's folder of random weights, and one quantized from it."""

    def make(family, quantize=None):
        raw = {
            **tiny_config,
            "model_type": family,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **MIXTURE,
        }
        (source := tmp_path / "source").mkdir()
        (source / "config.json").write_text(json.dumps(raw))
        model = random_model(config_from_hf(raw), dtype=jnp.float32)
        save_model(source / "model", flatten_names(split_model(model, nnx.Param)[1]), source, dtype=jnp.bfloat16)
        if quantize is None:
            return source / "model"
        quantize_folder(source / "model", tmp_path / "quantized", quantize)
        return tmp_path / "quantized"

    return make


@pytest.mark.parametrize(
    ("family", "stored", "served"),
    [
        repeat("qwen3_moe", None, "served_nvfp4"),
        repeat("qwen3_moe", "nvfp4", "served_nvfp4_stored"),
        ("gpt_oss", "mxfp4", "served_mxfp4"),
    ],
)
def test_a_mixture_in_the_format_predicts_as_training_did(family, stored, served, mixture, tmp_path):
    base = mixture(family, stored)
    others = () if family == "gpt_oss" else ("q_proj",)  # its other layers are merged in bfloat16
    lora = LoraConfig(rank=2, targets=("gate_up_proj", "down_proj", *others))
    trained = written(base, config_from_hf(read_config(base)).quantized(served), tmp_path / "adapter", served, lora)
    expected = logits(base, trained, served)
    export_adapter(trained.folder, base, tmp_path / "written")
    got = logits(tmp_path / "written")
    np.testing.assert_allclose(got, expected, atol=1e-4 * expected.std())
    assert np.abs(got - logits(base)).max() > 0.01 * expected.std()
    model = load_model(base, dtype=jnp.float32, quantize=served)
    add_adapter(model, trained.folder, identify(base))
    merge_served(model)
    tokens = jnp.arange(16)[None]
    files = forward(load_model(tmp_path / "written", dtype=jnp.float32), tokens)
    np.testing.assert_allclose(forward(model, tokens), files, atol=1e-3 * expected.std())
    name = "gate_up_proj" if family == "gpt_oss" else "gate_proj"
    assert any(name in tensor for tensor in open_checkpoint(tmp_path / "written").tensors)


@repeats_parts_of("test_a_mixture_in_the_format_predicts_as_training_did")
@pytest.mark.parametrize(
    ("served", "dora"), [repeat("nvfp4", False), ("nf4", True), repeat("nf4", False), repeat("nvfp4", True)]
)
def test_a_folder_already_in_the_format_stays_there(served, dora, base, tmp_path):
    quantize_folder(base, stored := tmp_path / "stored", served)
    own = config_from_hf(read_config(stored)).quantized(f"served_{served}")
    assert own.quantize == f"served_{served}_stored"
    lora = replace(CONFIG, dora=dora)
    trained = written(stored, own, tmp_path / "adapter", own.quantize, lora, std=0.005)
    expected = logits(stored, trained, own.quantize)
    export_adapter(trained.folder, stored, tmp_path / "written")
    got = logits(tmp_path / "written")
    np.testing.assert_allclose(got, expected, atol=1e-3 * expected.std())
    assert np.abs(got - logits(stored)).max() > 0.01 * expected.std(), "a small delta moves levels"
    scales = [name for name in open_checkpoint(stored).tensors if name.endswith(("_scale", ".absmax"))]
    for name in scales:
        before, after = (open_checkpoint(folder).read(name) for folder in (stored, tmp_path / "written"))
        np.testing.assert_array_equal(before, after)


def test_modelopts_layout_holds_the_values_of_training(base, adapter, tmp_path):
    trained = adapter("nvfp4")
    expected = logits(base, trained, "served_nvfp4")
    export_adapter(trained.folder, base, tmp_path / "written", quantize="nvfp4_modelopt")
    np.testing.assert_allclose(logits(tmp_path / "written"), expected, atol=1e-4 * expected.std())
    described = json.loads((tmp_path / "written/hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == read_config(tmp_path / "written")["quantization_config"]["quant_algo"]
    tensors = open_checkpoint(tmp_path / "written").tensors
    name = "model.layers.0.self_attn.q_proj.weight"
    assert tensors[name].dtype == np.uint8 and tensors[f"{name}_scale_2"].shape == ()
    shared = {float(open_checkpoint(tmp_path / "written").read(n)) for n in tensors if n.endswith("_scale_2")}
    assert shared == {1 / 256}, "vLLM joins matrices of one input, and reads one factor for them"


@repeats_parts_of("test_a_mixture_in_the_format_predicts_as_training_did")
@pytest.mark.parametrize("served", ["nvfp4", "nf4"])
def test_a_folder_in_the_format_predicts_as_training_did(served, base, adapter, tmp_path):
    trained = adapter(served)
    expected = logits(base, trained, f"served_{served}")
    export_adapter(trained.folder, base, tmp_path / "written")
    assert config_from_hf(read_config(tmp_path / "written")).quantize == served
    got = logits(tmp_path / "written")
    np.testing.assert_allclose(got, expected, atol=1e-4 * expected.std())
    assert np.abs(got - logits(base, trained)).max() > 0.01 * expected.std()
    names = open_checkpoint(tmp_path / "written").tensors
    marked = "weight_packed" if served == "nvfp4" else "weight.absmax"
    assert any(name.endswith(f"self_attn.o_proj.{marked}") for name in names), "layers without adapters are in it too"


def test_an_adapter_for_llama_cpp_asks_for_its_file(base, adapter, tmp_path):
    with pytest.raises(ValueError, match="trained to be served in q4_k_m: write it with --gguf q4_k_m"):
        export_adapter(adapter("q4_k_m").folder, base, tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_blocks_for_llama_cpp_hold_the_values_of_training(base, adapter):
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install '.[test]'")
    tensors = MergedTensors(base, adapter("q4_k_m").folder)
    kinds = {}
    for name in tensors.served:
        kinds[name] = tensors.packed_type(name)
        blocks = tensors.read_packed(name)
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kinds[name].upper()])
        np.testing.assert_allclose(values, tensors.read(name).astype(np.float32), rtol=2**-8, atol=1e-7)
    assert {kinds["model.layers.0.self_attn.q_proj.weight"], kinds["model.layers.1.mlp.down_proj.weight"]} == {
        "q4_k",
        "q6_k",
    }


def test_a_merge_into_few_bits_says_what_it_keeps(base, adapter, tmp_path):
    plain, rng = adapter("none", std=0.05), np.random.default_rng(1)
    tokens = rng.integers(0, 64, (2, 200), dtype=np.int32)
    segments = pack_segments([[200], [150]], seq_len=200)
    weights = (rng.random(tokens.shape) < 0.5) * np.asarray(segments.segment_ids > 0, np.float32)
    weights[0, 190:] = 0
    rows = first_rows(tokens, segments, "held-out", np.roll(tokens, -1, 1), weights)
    config = config_from_hf(read_config(base))
    model = folder_parts(base, config, dtype=jnp.float32, adapter=plain)
    # Targets that the adapter makes likely, so that it gains.
    chosen = np.asarray(predict(config, model, rows, jnp.dtype(jnp.float32)).argmax(-1), np.int32)
    ExportRows(
        tokens=rows.tokens, segments=rows.segments, source=rows.source, targets=chosen, loss_weights=rows.loss_weights
    ).save(plain.folder.parent / ROWS_FILE)
    gain = export_adapter(plain.folder, base, tmp_path / "written", quantize="nvfp4").gain
    assert gain is not None and gain.tokens == int((weights > 0).sum())
    losses = []
    for own in (logits_of(base, rows), logits_of(base, rows, plain), logits_of(tmp_path / "written", rows)):
        picked = np.take_along_axis(np.asarray(jax.nn.log_softmax(own)), chosen[..., None], -1)[..., 0]
        losses.append(-(picked * weights).sum() / weights.sum())
    np.testing.assert_allclose([gain.base, gain.adapted, gain.files], losses, rtol=1e-4)
    assert gain.share == pytest.approx((losses[0] - losses[2]) / (losses[0] - losses[1]), rel=1e-3)
    assert gain.share < 0.99


def logits_of(folder, rows, adapter=None):
    config = config_from_hf(read_config(folder))
    parts = folder_parts(folder, config, dtype=jnp.float32, adapter=adapter)
    return predict(config, parts, rows, jnp.dtype(jnp.float32))


def test_a_loaded_model_answers_merged(base, adapter, tmp_path):
    trained = adapter("nvfp4")
    model = load_model(base, dtype=jnp.float32, quantize="served_nvfp4")
    add_adapter(model, trained.folder, identify(base))
    tokens = jnp.arange(16)[None]
    apart = forward(model, tokens)
    merge_served(model)
    np.testing.assert_allclose(forward(model, tokens), apart, atol=1e-5)
    assert not jax.tree.leaves(nnx.state(model, nnx.LoRAParam)) and model.config.quantize == "none"
