"""Towers in llama.cpp's files: every tensor under its name there, with the values that it expects."""

import base64
import io
import json
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from llama_cpp import ask
from PIL import Image
from selection import repeats, thorough

from jaxglue.commands import main
from jaxglue.data.messages import read_chat
from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import AssistantConfig, SamplingConfig
from jaxglue.generation.scheduler import Request
from jaxglue.hf.gguf.mmproj import export_tower, is_written
from jaxglue.models import abstract_model, config_from_hf, with_vision
from jaxglue.models.parameters import abstract_parameters
from tests.goldens.drawn import drawn
from tests.models.test_vision import read_golden
from tests.training.test_vision import QUICKSTART, run

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install '.[test]'")
NAMES = {
    "qwen3_vl": {
        "v.patch_embd.bias": "visual.patch_embed.proj.bias",
        "v.position_embd.weight": "visual.pos_embed.weight",
        "v.blk.1.ln1.weight": "visual.blocks.1.norm1.weight",
        "v.blk.1.attn_qkv.bias": "visual.blocks.1.attn.qkv.bias",
        "v.blk.2.attn_out.weight": "visual.blocks.2.attn.proj.weight",
        "v.blk.0.ln2.bias": "visual.blocks.0.norm2.bias",
        "v.blk.0.ffn_up.weight": "visual.blocks.0.mlp.linear_fc1.weight",
        "v.blk.0.ffn_down.weight": "visual.blocks.0.mlp.linear_fc2.weight",
        "v.post_ln.weight": "visual.merger.norm.weight",
        "mm.0.weight": "visual.merger.linear_fc1.weight",
        "mm.2.bias": "visual.merger.linear_fc2.bias",
        "v.deepstack.2.norm.weight": "visual.deepstack_merger_list.1.norm.weight",
        "v.deepstack.0.fc1.weight": "visual.deepstack_merger_list.0.linear_fc1.weight",
        "v.deepstack.2.fc2.bias": "visual.deepstack_merger_list.1.linear_fc2.bias",
    },
    "gemma3": {
        "v.patch_embd.weight": "vision_tower.embeddings.patch_embedding.weight",
        "v.position_embd.weight": "vision_tower.embeddings.position_embedding.weight",
        "v.blk.1.attn_q.weight": "vision_tower.encoder.layers.1.self_attn.q_proj.weight",
        "v.blk.0.attn_out.bias": "vision_tower.encoder.layers.0.self_attn.out_proj.bias",
        "v.blk.1.ln2.weight": "vision_tower.encoder.layers.1.layer_norm2.weight",
        "v.blk.1.ffn_up.weight": "vision_tower.encoder.layers.1.mlp.fc1.weight",
        "v.post_ln.bias": "vision_tower.post_layernorm.bias",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
    },
    "mistral3": {
        "v.patch_embd.weight": "vision_tower.patch_conv.weight",
        "v.pre_ln.weight": "vision_tower.ln_pre.weight",
        "v.blk.0.attn_v.weight": "vision_tower.transformer.layers.0.attention.v_proj.weight",
        "v.blk.1.ffn_gate.weight": "vision_tower.transformer.layers.1.feed_forward.gate_proj.weight",
        "mm.input_norm.weight": "multi_modal_projector.norm.weight",
        "mm.patch_merger.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
        "mm.1.weight": "multi_modal_projector.linear_1.weight",
        "mm.2.bias": "multi_modal_projector.linear_2.bias",
    },
}
"""Names by the tables of llama.cpp's converter."""


@pytest.mark.parametrize("name", repeats([*NAMES, "qwen3_5"], "qwen3_5"))
def test_towers_have_llama_cpps_names_and_values(name, tmp_path):
    raw, _ = read_golden(name)
    config = with_vision(config_from_hf(raw), raw)
    specs = abstract_parameters(abstract_model(config, dtype=jnp.float32))
    values = {key: drawn(key, spec.shape) for key, spec in specs.items()}
    tensors = SimpleNamespace(specs=specs, read=values.__getitem__)
    tokenizer = SimpleNamespace(convert_tokens_to_ids={"[IMG_BREAK]": 23}.__getitem__)
    assert is_written(config.vision)
    reader = gguf.GGUFReader(export_tower(tensors, config, tmp_path, name="tiny", tokenizer=tokenizer))
    found = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}

    def check(theirs, expected):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found.pop(theirs), expected, rtol=0, atol=1e-3 * scale, err_msg=theirs)

    for theirs, ours in NAMES.get(name, {}).items():
        check(theirs, values[f"model.{ours}"])
    more = len(found)
    if name.startswith("qwen"):
        patch = values["model.visual.patch_embed.proj.weight"]
        check("v.patch_embd.weight", patch[:, :, 0])
        check("v.patch_embd.weight.1", patch[:, :, 1])
        more -= 1
    elif name == "gemma3":
        check("mm.soft_emb_norm.weight", 1 + values["model.multi_modal_projector.mm_soft_emb_norm.weight"])
    else:
        check("v.token_embd.img_break", values["model.embed_tokens.weight"][23])
        query = values["model.vision_tower.transformer.layers.0.attention.q_proj.weight"]  # 2 heads of 8
        halves = query.reshape(2, 2, 4, -1)
        check("v.blk.0.attn_q.weight", halves.transpose(0, 2, 1, 3).reshape(query.shape))
        more -= 1
    owned = [key for key in specs if config.vision.owns(key)]
    assert more + len(NAMES.get(name, {})) == len(owned)
    fields = reader.fields
    assert fields["general.type"].contents() == "mmproj" and fields["clip.vision.block_count"].contents() in (2, 3)
    kinds = {"gemma3": "gemma3", "mistral3": "pixtral"}
    assert fields["clip.projector_type"].contents() == kinds.get(name, "qwen3vl_merger")
    if name == "qwen3_vl":
        assert fields["clip.vision.is_deepstack_layers"].contents() == [True, False, True]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A model of a step's training, with one layer of each kind, in sizes that llama.cpp has."""
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copytree(QUICKSTART / "seeing", folder / "model")
    raw = json.loads((folder / "model" / "config.json").read_text())
    linear = {f"linear_{kind}_head_dim": 64 for kind in ("key", "value")}
    linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    raw["text_config"] |= layers | linear | {"full_attention_interval": 2}
    (folder / "model" / "config.json").write_text(json.dumps(raw))
    rows = (QUICKSTART / "pictures.jsonl").read_text().splitlines()[:4]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    run(folder, folder / "run", method="full", train_vision="all", steps=1, epochs=1)
    return folder / "run" / "model"


@thorough("hf/test_mmproj.py")
def test_llama_cpp_sees_what_we_see(seeing, tmp_path):
    """Sides are whole merged patches, so that neither program resizes."""
    pytest.importorskip("xllamacpp", reason="needs xllamacpp: pip install '.[test]'")
    main(["export", "--gguf", "f16", "--base", str(seeing), "--output", str(tmp_path / "out")])
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3)).astype(np.uint8).repeat(8, 0).repeat(16, 1)
    Image.fromarray(pixels).save(data := io.BytesIO(), "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    files = {"model": tmp_path / "out" / "out-f16.gguf", "mmproj": tmp_path / "out" / "mmproj-out.gguf"}
    (reply,) = ask(**files, bodies=[body])["replies"]
    (place,) = reply["choices"][0]["logprobs"]["content"]
    theirs = {each["token"]: each["logprob"] for each in place["top_logprobs"]}
    assistant = Assistant(AssistantConfig(model=str(seeing)))
    prompt = assistant.encode(read_chat(messages, None, "messages", sees=True))
    request = Request(prompt.tokens, SamplingConfig(temperature=0, max_tokens=1), top_log_probs=5, images=prompt.images)
    (done,) = assistant.engine.generate(assistant.adapter, assistant.frozen, [request])
    assert reply["usage"]["prompt_tokens"] == len(prompt.tokens)
    tokens, values = (each[0].tolist() for each in done.top)
    ours = dict(zip(map(assistant.tokenizer.decode, tokens), values, strict=True))
    assert len(theirs.keys() & ours.keys()) >= 4
    for name in theirs.keys() & ours.keys():
        assert abs(theirs[name] - ours[name]) < 0.02, (theirs, ours)
