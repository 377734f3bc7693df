"""Written folders as transformers and PEFT compute them; goldens by tests/goldens/make_adapter_logits.py."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.adapter_check import fit_tied
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import load_model
from jaxglue.hf.merge import export_adapter
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.segments import pack_segments
from tests.models.test_parity import PEFT
from tests.selection import repeats

GOLDENS = Path(__file__).parents[1] / "goldens"
BASE, ADAPTER, MERGED = GOLDENS / "qwen3_tied", GOLDENS / "adapter", GOLDENS / "merged"


def test_merged_folder_gives_transformers_logits():
    model, golden = load_model(MERGED, dtype=jnp.float32), load_file(GOLDENS / "merged.safetensors")
    segments = pack_segments([golden["lengths"].tolist()], seq_len=len(golden["tokens"]))
    logits = nnx.jit(lambda model, *row: model(*row))(model, golden["tokens"][None], segments)[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


def test_adapter_and_merged_folder_agree_and_change_the_base():
    base, adapter, merged = (
        load_file(path)["logits"]
        for path in (BASE / "golden.safetensors", GOLDENS / "adapter.safetensors", GOLDENS / "merged.safetensors")
    )
    np.testing.assert_allclose(adapter, merged, rtol=0, atol=1e-4)
    assert np.abs(adapter - base).max() > 0.1


def test_written_adapter_equals_the_golden(tmp_path):
    adapter = load_adapter(ADAPTER)
    config, tensors = adapter.config, adapter.tensors
    save_adapter(tmp_path / "adapter", tensors, config, "qwen3_tied")
    assert (tmp_path / "adapter/adapter_config.json").read_bytes() == (ADAPTER / "adapter_config.json").read_bytes()
    ours, golden = (header_and_data(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", ADAPTER))
    assert ours == golden


def header_and_data(path):
    """Return a file's header, without the digest that PEFT does not write, and its tensors' bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header["__metadata__"].pop("jaxglue.digest", None)
    return header, raw[start:]


def test_written_folder_equals_the_golden(tmp_path):
    export_adapter(ADAPTER, BASE, tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text()) == read_config(MERGED)
    ours, golden = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", MERGED))
    assert ours.keys() == golden.keys()
    for name, array in golden.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
def test_live_transformers_and_peft_load_written_folders(tmp_path, max_shard_bytes):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    export_adapter(ADAPTER, BASE, tmp_path / "merged", max_shard_bytes)
    adapter = load_adapter(ADAPTER)
    config, tensors = adapter.config, adapter.tensors
    save_adapter(tmp_path / "adapter", tensors, config, str(BASE))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), tmp_path / "adapter")
    golden = load_file(GOLDENS / "adapter.safetensors")
    document = torch.tensor(golden["tokens"][: golden["lengths"][0]])[None].long()
    for model in (adapted, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        logits = model.eval()(document).logits[0].detach().numpy()
        np.testing.assert_allclose(logits, golden["logits"][: len(logits)], rtol=0, atol=1e-4)


@pytest.fixture
def rewrite(tmp_path):
    """Read one of PEFT's golden adapters and write it with jaxglue; return (base, folder)."""

    def write(name: str) -> tuple[Path, Path]:
        base, adapter = GOLDENS / PEFT[name], load_adapter(GOLDENS / "peft" / name)
        tied = adapter.adapted(config_from_hf(read_config(base))).tie_word_embeddings
        adapter = fit_tied(adapter) if tied else adapter
        save_adapter(tmp_path / name, adapter.tensors, adapter.config, str(base), tied=tied)
        return base, tmp_path / name

    return write


@pytest.mark.parametrize("name", repeats(PEFT, "untied_both", "untied_head"))
def test_adapters_are_written_with_the_tensors_and_features_that_peft_gave_them(rewrite, name):
    _, folder = rewrite(name)
    theirs, ours = (load_file(path / "adapter_model.safetensors") for path in (GOLDENS / "peft" / name, folder))
    theirs = {key: tensor for key, tensor in theirs.items() if ".base_layer.weight" not in key}  # not trained
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        order = np.argsort([7, 3, 20]) if "trainable_tokens" in key else ...
        np.testing.assert_array_equal(ours[key], tensor[order])
    raw, golden = (json.loads((path / "adapter_config.json").read_text()) for path in (folder, GOLDENS / "peft" / name))
    for field in ("use_dora", "use_rslora", "ensure_weight_tying"):
        assert raw.get(field, False) == golden.get(field, False)
    assert load_adapter(folder).config == load_adapter(GOLDENS / "peft" / name).config


@pytest.mark.parametrize("name", repeats(PEFT, "untied_both", "untied_head", "whole", "vocabulary", "untied"))
def test_merged_folders_predict_as_base_and_peft_adapter(tmp_path, name):
    base, golden = GOLDENS / PEFT[name], load_file(GOLDENS / "peft" / name / "golden.safetensors")
    check = export_adapter(GOLDENS / "peft" / name, base, tmp_path / "merged")
    assert check.kl <= check.limit
    model = load_model(tmp_path / "merged", dtype=jnp.float32)
    segments = pack_segments([golden["lengths"].tolist()], seq_len=len(golden["tokens"]))
    logits = nnx.jit(lambda model, *row: model(*row))(model, golden["tokens"][None], segments)[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", repeats(PEFT, "untied_both", "untied_head"))
def test_live_peft_loads_written_features(rewrite, name):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base, folder = rewrite(name)
    golden = load_file(GOLDENS / "peft" / name / "golden.safetensors")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    document = torch.tensor(golden["tokens"][: golden["lengths"][0]])[None].long()
    logits = model(document).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, golden["logits"][: len(logits)], rtol=0, atol=1e-4)


def test_merged_folders_of_untied_adapters_say_so(tmp_path):
    """PEFT saves a copy of the embedding alone, and the base's matrix stays the output projection."""
    export_adapter(GOLDENS / "peft/untied", GOLDENS / "qwen3_tied", tmp_path / "merged")
    assert read_config(tmp_path / "merged")["tie_word_embeddings"] is False
    merged, base = load_file(tmp_path / "merged/model.safetensors"), load_file(GOLDENS / "qwen3_tied/model.safetensors")
    np.testing.assert_array_equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    assert not np.array_equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_an_export_is_checked_against_its_input_by_peft_s_rules(tmp_path, monkeypatch):
    """Predictions of base and adapter apart share the mistakes of the adapter's reader."""
    scale_of = LoraConfig.scale_of
    with monkeypatch.context() as patch:
        patch.setattr(LoraConfig, "scale_of", lambda config, path: 1.5 * scale_of(config, path))
        with pytest.raises(ValueError, match=r"row \d+ of model\.layers\S+ is not that of .* by PEFT's rules"):
            export_adapter(ADAPTER, BASE, tmp_path / "scaled")
    monkeypatch.setattr("jaxglue.hf.adapter.saved_modules", lambda raw: set())
    with pytest.raises(ValueError, match=r"of lm_head.weight is not that of .* by PEFT's rules"):
        export_adapter(GOLDENS / "peft/untied", GOLDENS / "qwen3_tied", tmp_path / "merged")


def test_rows_of_an_untied_head_are_refused(tmp_path):
    folder = shutil.copytree(GOLDENS / "peft/untied_head", tmp_path / "rows")
    raw = json.loads((folder / "adapter_config.json").read_text())
    rows = {"modules_to_save": None, "trainable_token_indices": {"lm_head": [1]}}
    (folder / "adapter_config.json").write_text(json.dumps(raw | rows))
    tensors, prefix = load_file(folder / "adapter_model.safetensors"), "base_model.model.lm_head"
    tensors[f"{prefix}.token_adapter.trainable_tokens_delta"] = tensors.pop(f"{prefix}.weight")[:1].copy()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"trains rows of lm_head apart .* train the same rows of embed_tokens"):
        export_adapter(folder, GOLDENS / "qwen3_tied", tmp_path / "merged")
