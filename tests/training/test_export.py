"""Exports of runs prove themselves, and are trained on from."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxglue.hf.adapter import TENSORS, load_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export_check import CHECK_FILE, TRAINED_FILE
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.training import result as result_module
from jaxglue.training.checkpoint_export import export_checkpoint
from jaxglue.training.result import export_result
from jaxglue.training.train import train
from jaxglue.training.vocabulary import Vocabulary
from jaxglue.training.workload import settle
from tests.selection import repeat, repeats_parts_of


def test_an_adapter_is_read_back_trained_on_and_merged(with_weights, model_folder, tmp_path):
    options = {"steps": 2, "eval_fraction": 0.2, "rank_pattern": ("down_proj=2",)}
    first = train(with_weights(output=tmp_path / "first", **options))
    kept = json.loads((first.adapter / CHECK_FILE).read_text())
    assert kept["kl"] <= 1e-6
    assert kept["rows"] == "held-out"
    start = load_adapter(first.adapter)
    assert start.base is not None and start.tensors["model.layers.0.mlp.down_proj.lora_A"].shape[0] == 2

    config = with_weights(output=tmp_path / "second", steps=1)
    config = replace(config, lora=type(config.lora)(), model=replace(config.model, adapter=first.adapter))
    second = train(config)
    after = load_adapter(second.adapter)
    assert after.config == start.config
    assert abs(second.first_loss - first.last_loss) < 0.5
    moved = max(np.abs(after.tensors[name] - start.tensors[name]).max() for name in start.tensors)
    assert 0 < moved < 0.1  # a step from there, not from a new start

    check = export_adapter(second.adapter, model_folder, tmp_path / "merged")
    assert check.kl <= check.limit

    dropouts = [None, 0.0, 0.25]
    for given, taken in zip(dropouts, [0.5, 0.0, 0.25], strict=True):
        lora, dropping = replace(config.lora, dropout=given), replace(start, config=replace(start.config, dropout=0.5))
        vocabulary = Vocabulary(tokenizer=None, base_size=1, size=1)
        model = config_from_hf(read_config(model_folder))
        settled = settle(replace(config, lora=lora), model, devices=1, adapter=dropping, vocabulary=vocabulary)
        assert settled.lora == replace(start.config, dropout=taken)
    with pytest.raises(ValueError, match="brings its own rank 4"):
        train(replace(config, lora=replace(config.lora, rank=3), run=replace(config.run, output=tmp_path / "third")))


def test_a_run_on_several_sources_keeps_rows_of_them(make_config, write_jsonl, chat_rows):
    sources = (write_jsonl(chat_rows(9)), write_jsonl(chat_rows(9, seed=1), "more.jsonl"))
    adapter = train(make_config(data=sources, steps=1)).adapter
    kept = np.load(adapter.parent / TRAINED_FILE)
    assert kept["tokens"].any()


@repeats_parts_of("test_adapters_of_embedding_and_head_are_trained_saved_merged_and_trained_on")
def test_an_adapter_that_unties_the_head_is_trained_on(with_weights, model_folder, tmp_path):
    """As PEFT's are without ensure_weight_tying: the base's matrix stays the output projection."""
    first = train(with_weights(output=tmp_path / "first", steps=2, modules_to_save=("embed_tokens",))).adapter
    raw = json.loads((first / "adapter_config.json").read_text())
    raw |= {"ensure_weight_tying": False, "modules_to_save": ["embed_tokens"]}
    (first / "adapter_config.json").write_text(json.dumps(raw))
    tensors = load_file(first / TENSORS)
    save_file({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, first / TENSORS)

    config = with_weights(steps=2)
    config = replace(config, lora=LoraConfig(), model=replace(config.model, adapter=first))
    second = train(config).adapter  # predicts as the folder
    assert export_checkpoint(tmp_path / "run", "2", tmp_path / "exported") == 2
    for folder in (second, tmp_path / "exported"):
        written = json.loads((folder / "adapter_config.json").read_text())
        assert (written["ensure_weight_tying"], written["modules_to_save"]) == (False, ["embed_tokens"])
        assert load_adapter(folder).tensors.keys() == load_adapter(first).tensors.keys()
    export_adapter(second, model_folder, tmp_path / "merged")
    base, merged = (load_file(folder / "model.safetensors") for folder in (model_folder, tmp_path / "merged"))
    np.testing.assert_array_equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    assert not np.array_equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"embedding and output projection apart, which --random-weights draws as one"):
        random = replace(config.model, random_weights=True)
        train(replace(config, model=random, run=replace(config.run, output=tmp_path / "random")))


@repeats_parts_of("test_an_adapter_is_read_back_trained_on_and_merged")
@pytest.mark.parametrize("options", [{"new_tokens": "<|tool|>\n"}, repeat({"modules_to_save": ("embed_tokens",)})])
def test_checkpoints_of_trained_vocabularies_and_dora_are_exported(with_weights, model_folder, tmp_path, options):
    if text := options.get("new_tokens"):
        options = {"new_tokens": tmp_path / "new.txt"}
        options["new_tokens"].write_text(text)
    run = train(with_weights(steps=1, dora=True, **options)).adapter
    assert export_checkpoint(tmp_path / "run", "1", tmp_path / "exported") == 1
    exported, kept = load_adapter(tmp_path / "exported"), load_adapter(run)
    assert exported.config == kept.config and exported.tensors.keys() == kept.tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, exported.tensors, kept.tensors)
    assert (tmp_path / "exported/tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    check = export_adapter(tmp_path / "exported", model_folder, tmp_path / "merged")
    assert check.kl <= check.limit


def test_an_export_that_differs_fails(with_weights, tmp_path, monkeypatch):
    def damaged(*args, **options):
        folder = export_result(*args, **options)
        tensors = load_file(folder / TENSORS)
        save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / TENSORS)
        return folder

    monkeypatch.setattr(result_module, "export_result", damaged)
    with pytest.raises(ValueError, match="differs from the trained one; the export failed"):
        train(with_weights(steps=1))


@pytest.mark.parametrize("file", ["chat_template.jinja", repeat("tokenizer.json"), "generation_config.json"])
def test_an_export_that_would_be_served_otherwise_fails(with_weights, tmp_path, monkeypatch, file):
    """A merge that only the training row needs is lost from the tokenizer."""

    def damaged(*args, **options):
        folder = export_result(*args, **options)
        path = folder / file
        if path.suffix == ".jinja":
            path.write_text(path.read_text() + "{{ 'more' }}")
            return folder
        raw = json.loads(path.read_text())
        if file == "tokenizer.json":
            raw["model"]["merges"] = [merge for merge in raw["model"]["merges"] if "".join(merge) != "What"]
        path.write_text(json.dumps(raw | ({} if "model" in raw else {"eos_token_id": 0})))
        return folder

    monkeypatch.setattr(result_module, "export_result", damaged)
    says = {"chat": "in the text of conversation 1", "toke": "in the tokens of conversation 4", "gene": "not stop at"}
    with pytest.raises(ValueError, match=rf"{says[file[:4]]}.*; the export failed"):
        train(with_weights(steps=1))


def test_a_full_model_is_read_back(with_weights, tmp_path):
    summary = train(with_weights(steps=1, method="full"))
    kept = json.loads((summary.adapter / CHECK_FILE).read_text())
    assert kept["kl"] <= kept["limit"]
    export_checkpoint(tmp_path / "run", "1", tmp_path / "exported")
    for folder in (summary.adapter, tmp_path / "exported"):  # as it was trained, on a CPU
        tensors = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float32)}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("head", [True, repeat(False)])
def test_adapters_of_embedding_and_head_are_trained_saved_merged_and_trained_on(with_weights, model_folder, head):
    """As PEFT's on a tied base: the embedding's adapter is not the output projection's."""
    targets = ("v_proj", "embed_tokens", "lm_head") if head else ("v_proj", "embed_tokens")
    config = with_weights(steps=2, targets=targets)
    first = train(config).adapter  # predicts as the folder
    tensors = load_adapter(first).tensors
    assert all(tensor.any() for tensor in tensors.values())
    assert sum(name.startswith(("model.embed", "lm_head")) for name in tensors) == (4 if head else 2)
    more = replace(config, lora=LoraConfig(), model=replace(config.model, adapter=first))
    second = train(replace(more, run=replace(config.run, output=config.run.output.with_name("second")))).adapter
    moved = np.abs(load_adapter(second).tensors["model.embed_tokens.lora_A"] - tensors["model.embed_tokens.lora_A"])
    assert 0 < moved.max() < 0.05
    check = export_adapter(second, model_folder, config.run.output / "merged")
    assert check.kl <= check.limit
    assert read_config(config.run.output / "merged")["tie_word_embeddings"] is False


@repeats_parts_of("test_a_full_model_is_read_back")
def test_a_full_model_s_masters_are_compared_as_they_are_written(model_folder, make_config):
    """In 16 bits: the rounding of norms' weights, as of Gemma's, would differ more the deeper the model."""
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma2"}))
    summary = train(make_config(steps=3, method="full", random_weights=True, dtype="bfloat16", learning_rate=0.03))
    assert json.loads((summary.adapter / CHECK_FILE).read_text())["max_logit_difference"] == 0
