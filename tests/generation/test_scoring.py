"""Scores of reward models: an adapter and its merged folder, and refusals of other models."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from tiny_runs import make_seeing

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.scoring import RewardScorer
from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import save_model
from jaxglue.hf.loading import random_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.serve.config import ScoreConfig
from jaxglue.serve.scores import score_rows

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folders(tmp_path, make_tokenizer):
    """Write a base with an output projection, and a reward model's adapter."""
    base, adapter, texts = (tmp_path / name for name in ("base", "adapter", "texts"))
    texts.mkdir()
    (texts / "config.json").write_text(json.dumps(RAW))
    make_tokenizer().save_pretrained(texts)
    model = random_model(config_from_hf(RAW), dtype=jnp.float32)
    save_model(base, flatten_names(split_model(model, nnx.Param)[1]), texts)
    rng = np.random.default_rng(0)
    shapes = {"lora_A": (2, 16), "lora_B": (16, 2)}
    linear = "model.layers.0.self_attn.o_proj"
    tensors = {f"{linear}.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["score.weight"] = rng.normal(size=(1, 16)).astype(np.float32)
    save_adapter(adapter, tensors, LoraConfig(rank=2, targets=("o_proj",)), base)
    return base, adapter


def test_adapter_and_merged_folder_score_alike(folders, tmp_path, write_jsonl):
    base, adapter = folders
    merged = tmp_path / "merged"
    export_adapter(adapter, base, merged)
    raw = read_config(merged)
    assert raw["architectures"] == ["LlamaForSequenceClassification"]
    assert (raw["id2label"], raw["pad_token_id"]) == ({"0": "LABEL_0"}, 0)
    pair = {"prompt": "What is 3", "chosen": " plus 4?", "rejected": " and more?"}
    rows = [pair, {"prompt": "It is", "chosen": " 7", "rejected": " 8"}]
    data = (write_jsonl(rows), write_jsonl([{"text": "What is 3 plus 4?"}], "text.jsonl"))
    apart, together = (
        [scores for _, scores in score_rows(ScoreConfig(data=data, **model))]
        for model in ({"adapter": adapter}, {"model": merged})
    )
    assert list(map(len, apart)) == [2, 2, 1]
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert apart[0][0] == pytest.approx(apart[2][0], abs=1e-5)  # the same text, apart from its packing


def test_reward_models_write_no_text_and_others_score_none(folders):
    base, adapter = folders
    assert load_adapter(adapter).scores
    with pytest.raises(ValueError, match="is a reward model or classifier, which writes no text: use jaxglue score"):
        Assistant(AssistantConfig(adapter=adapter))
    with pytest.raises(ValueError, match="is no reward model: train one with"):
        RewardScorer(AssistantConfig(model=base))


def test_documents_beyond_the_limit_are_named(folders, write_jsonl):
    data = write_jsonl([{"text": "fine"}, {"text": "What is 3 plus 4? " * 40}])
    with pytest.raises(ValueError, match=r"data.jsonl:2: .* tokens are above the model's limit of 64"):
        list(score_rows(ScoreConfig(adapter=folders[1], data=(data,))))


def test_conversations_without_an_answer_are_scored(folders, make_tokenizer, write_jsonl):
    """Classifiers read messages of users, and no score needs a loss mask, as an unstable template leaves none."""
    user, assistant = ({"role": role, "content": "What is 3?"} for role in ("user", "assistant"))
    chats = [[user], [user, assistant, user], [user, assistant, user, assistant]]
    data = (write_jsonl([{"messages": chat} for chat in chats]),)
    scorer = RewardScorer(AssistantConfig(adapter=folders[1]))
    for template in ("plain", "unstable"):
        tokenizer = make_tokenizer(template)
        tokenizer.save_pretrained(folders[0])
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        expected = scorer.score([tokenizer.encode(text, add_special_tokens=False) for text in texts])
        found = [scores for _, scores in score_rows(ScoreConfig(adapter=folders[1], data=data))]
        assert found == [(pytest.approx(score, abs=1e-5),) for score in expected]


def test_scores_are_of_the_images_among_the_tokens(tmp_path, folders):
    make_seeing(tmp_path / "seeing", "full_attention", depth=1)
    raw = read_config(tmp_path / "seeing") | {"architectures": ["Qwen3_5ForSequenceClassification"], "num_labels": 1}
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(raw))
    scorer, shown = RewardScorer(AssistantConfig(model=tmp_path / "seeing", random_weights=0)), []
    for color in ("red", "blue"):
        Image.new("RGB", (64, 32), color).save(data := io.BytesIO(), "PNG")
        shown.append(scorer.rules.shown(data.getvalue()))
    red, blue = shown
    document = [5, *[scorer.rules.tokens[0]] * 8, 6]
    found = scorer.score([document, document, [5, 6], [*document, *document]], [[red], [blue], [], [blue, red]])
    assert len({round(score, 4) for score in found}) == 4
    assert scorer.score([document], [[blue]]) == pytest.approx(found[1:2], abs=1e-5)
    with pytest.raises(ValueError, match="sees no images"):
        RewardScorer(AssistantConfig(adapter=folders[1])).score([document], [[red]])
