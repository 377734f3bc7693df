"""Folders of models around a text model: it is trained, and the other parts pass through."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from selection import repeat

from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.adapter_check import check_adapter
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.hf.export import quantize_folder, save_model
from jaxglue.hf.identity import identify
from jaxglue.hf.loading import add_adapter, load_model, random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.models.wrapper import find_names, text_config

TEXT = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
GEMMA = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT}
LFM = {"model_type": "lfm2_vl", "text_config": {**TEXT, "layer_types": ["conv", "full_attention"]}}
MISTRAL = {"model_type": "mistral3", "text_config": {**TEXT, "sliding_window": None}}
OTHERS = {
    "vision_tower.layers.0.self_attn.q_proj.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "multi_modal_projector.linear.weight": np.ones((2, 5), jnp.bfloat16),
}
OLD, NEW = "language_model.model.", "model.language_model."


@pytest.fixture
def make_folder(tmp_path):
    """Write a wrapper's folder with random weights; make_folder(raw, start of the decoder's names)."""

    def make(raw, start=OLD):
        folder = tmp_path / "base"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "preprocessor_config.json").write_text('{"size": 3}')
        prefix, names = "language_model." if start == OLD else "", find_names(text_config(raw))
        tensors = {
            start + name.removeprefix("model.") if name.startswith("model.") else prefix + name: np.asarray(array)
            for name, array in parameters(random_model(config_from_hf(raw), dtype=jnp.float32)).items()
        }
        tensors = {name if names is None else names.stored(name): array for name, array in tensors.items()}
        others = OTHERS if start == OLD else {f"model.{name}": array for name, array in OTHERS.items()}
        save_file(tensors | others, folder / "model.safetensors")
        return folder

    return make


def parameters(model):
    return flatten_names(split_model(model, nnx.Param)[1])


def make_adapter(folder, base, **changes):
    model = load_model(base, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(2):
        for kind, (out, width) in {"self_attn.q_proj": (64, 64), "mlp.down_proj": (64, 64)}.items():
            tensors[f"model.layers.{layer}.{kind}.lora_A"] = rng.normal(size=(2, width)).astype(np.float32)
            tensors[f"model.layers.{layer}.{kind}.lora_B"] = rng.normal(size=(out, 2)).astype(np.float32)
    config = LoraConfig(rank=2, targets=("q_proj", "down_proj"), **changes)
    save_adapter(folder, tensors, config, base, identify(base), text_path=model.config.text_path)
    return tensors


@pytest.mark.parametrize(("raw", "start"), [(GEMMA, OLD), repeat(GEMMA, NEW), (MISTRAL, OLD), (LFM, NEW)])
def test_text_model_is_that_of_a_folder_of_its_own(raw, start, make_folder, tmp_path):
    base, alone = make_folder(raw, start), tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(dict(text_config(raw))))
    save_file(
        {name: open_checkpoint(base).read(name) for name in open_checkpoint(base).tensors}, alone / "model.safetensors"
    )
    ours, other = (load_model(folder, dtype=jnp.float32) for folder in (base, alone))
    assert ours.config.wrapper == raw["model_type"]
    logits = nnx.jit(lambda model: model(np.arange(9)[None]))
    np.testing.assert_array_equal(logits(ours), logits(other))
    assert identify(base) == identify(alone)


@pytest.mark.parametrize(("raw", "start"), [(GEMMA, OLD), (GEMMA, NEW), (MISTRAL, OLD)])
def test_exports_keep_names_and_the_parts_around_the_text_model(raw, start, make_folder, tmp_path):
    base = make_folder(raw, start)
    stored = load_file(base / "model.safetensors")
    make_adapter(tmp_path / "adapter", base)
    export_adapter(tmp_path / "adapter", base, tmp_path / "merged")
    save_model(tmp_path / "full", parameters(load_model(base, dtype=jnp.float32)), base)
    for folder, adapted in (("merged", ("q_proj.weight", "down_proj.weight")), ("full", ())):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == stored.keys()
        for name, tensor in stored.items():
            same = written[name].dtype == tensor.dtype and np.array_equal(written[name], tensor)
            assert same != ("language_model" in name and name.endswith(adapted or "-")), name
        assert (tmp_path / folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
        assert (tmp_path / folder / "preprocessor_config.json").is_file()


def test_adapters_have_pefts_names_of_the_wrapper_and_adapt_text_alone(make_folder, tmp_path):
    base, folder = make_folder(GEMMA), tmp_path / "adapter"
    tensors = make_adapter(folder, base, alpha_pattern=("model.layers.1.mlp.down_proj=3",))
    written = load_file(folder / "adapter_model.safetensors")
    start = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    assert {name for name in written if ".0.self_attn" in name} == {f"{start}.lora_A.weight", f"{start}.lora_B.weight"}
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["target_modules"] == r"model\.language_model\.layers\.\d+\.(.+\.)?(down_proj|q_proj)"
    assert described["alpha_pattern"] == {"model.language_model.layers.1.mlp.down_proj": 3}
    read = add_adapter(load_model(base, dtype=jnp.float32), folder)
    assert read.text_path == "model.language_model" and read.config.scale_of("model.layers.1.mlp.down_proj") == 1.5
    assert all(np.array_equal(read.tensors[name], tensor) for name, tensor in tensors.items())


def test_adapters_of_other_parts_are_left_out_where_they_learned_nothing(make_folder, tmp_path):
    base, folder = make_folder(GEMMA), tmp_path / "adapter"
    make_adapter(folder, base)
    start = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_"
    others = {f"{start}A.weight": np.ones((2, 3), np.float32), f"{start}B.weight": np.zeros((4, 2), np.float32)}
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(tensors | others, folder / "adapter_model.safetensors")
    assert len(load_adapter(folder).tensors) == len(tensors)
    others[f"{start}B.weight"][0] = 1
    save_file(tensors | others, folder / "adapter_model.safetensors")
    loaded = load_adapter(folder)
    assert len(loaded.tensors) == len(tensors) + 2 and all("vision_tower" in name for name in loaded.beside_text)


def test_adapters_on_patches_of_gemma_4_12b_have_other_names_as_modules_than_in_files(tmp_path):
    shapes = {"model.embed_vision.embedding_projection": (6, 4), "model.vision_embedder.patch_dense": (4, 8)}
    tensors = {f"{name}.lora_A": np.ones((2, columns), np.float32) for name, (_, columns) in shapes.items()}
    tensors |= {f"{name}.lora_B": np.ones((rows, 2), np.float32) for name, (rows, _) in shapes.items()}
    kind, config = "gemma4_unified_text", LoraConfig(rank=2, targets=("all-linear",))
    save_adapter(tmp_path, tensors, config, "base", model_type=kind, text_path="model.language_model")
    adapter = load_adapter(tmp_path)
    assert all(".embed_vision." in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    check_adapter(adapter, shapes, {"model_type": kind}, "the model")


def test_adapters_of_earlier_transformers_are_read(make_folder, tmp_path):
    base, folder = make_folder(GEMMA), tmp_path / "adapter"
    tensors = make_adapter(folder, base)
    stored = load_file(folder / "adapter_model.safetensors")
    renamed = {
        name.replace(".model.language_model.", ".language_model.model."): value for name, value in stored.items()
    }
    save_file(renamed, folder / "adapter_model.safetensors")
    raw = json.loads((folder / "adapter_config.json").read_text())
    raw["target_modules"] = r"(?:.*?language_model.*?(?:self_attn|mlp).*?(?:q_proj|down_proj))"
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    assert add_adapter(load_model(base, dtype=jnp.float32), folder).tensors.keys() == tensors.keys()


def test_quantized_folders_leave_other_parts_and_say_so(make_folder, tmp_path):
    base = make_folder(GEMMA)
    quantize_folder(base, tmp_path / "int8", "int8")
    written = load_file(tmp_path / "int8/model.safetensors")
    assert written["language_model.model.layers.0.mlp.up_proj.weight"].dtype == np.int8
    assert all(np.array_equal(written[name], tensor) for name, tensor in OTHERS.items())
    skipped = read_config(tmp_path / "int8")["quantization_config"]["llm_int8_skip_modules"]
    assert {"lm_head", "model.vision_tower", "multi_modal_projector"} <= set(skipped)
    assert load_model(tmp_path / "int8").config.quantize == "int8"


def test_modules_that_a_folder_leaves_unquantized_are_those_of_the_text_model():
    modules = ["language_model.model.layers.1.mlp.up_proj", "model.language_model.layers.0.self_attn", "vision_tower"]
    entry = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": modules}
    config = config_from_hf({**GEMMA, "quantization_config": entry})
    kept = {f"model.layers.0.self_attn.{kind}_proj" for kind in ("q", "k", "v", "o", "qkv", "q_a", "q_b", "kv_b")}
    kept |= {"model.layers.0.self_attn.kv_a_proj_with_mqa"}
    names = set(config.unquantized)
    assert names >= kept and {name for name in names if ".0.self_attn." not in name} == {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("top", "text", "head", "tied"),
    [(True, False, True, False), (True, False, False, True), (None, None, True, False), (None, None, False, True)],
)
def test_files_decide_whether_a_mistral_is_tied_where_config_does_not(top, text, head, tied, make_folder):
    base = make_folder({**MISTRAL, "tie_word_embeddings": not head})
    raw = {**MISTRAL, "tie_word_embeddings": top, "text_config": {**TEXT, "tie_word_embeddings": text}}
    (base / "config.json").write_text(json.dumps(raw))
    assert config_from_hf(read_config(base)).tie_word_embeddings == tied
    assert (load_model(base).lm_head is None) == tied


def test_published_config_takes_gemma_3s_defaults():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = config_from_hf(
        {"model_type": "gemma3", "text_config": text, "vision_config": {}, "torch_dtype": "bfloat16"}
    )
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (262_208, 8, 4)
    assert config.head_dim == 256 and config.tie_word_embeddings and config.layer_kinds[5].rope.factor == 8.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "gemma3"}, "text_config in config.json: gemma3 needs an object, got None"),
        (
            {**GEMMA, "text_config": {**TEXT, "model_type": "llama"}},
            "'llama' is not supported inside gemma3: known are",
        ),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma2"}}, "'paligemma' has parts beside text"),
    ],
)
def test_other_text_models_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(raw)


def test_reward_models_of_wrappers_that_see_nothing_are_refused():
    with pytest.raises(ValueError, match="reward models of lfm2_vl are not supported: use a folder of lfm2, its text"):
        _ = config_from_hf(LFM).scored()
