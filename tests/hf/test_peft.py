"""Written folders as transformers and PEFT compute them; goldens by tests/goldens/make_adapter_logits.py."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxglue.hf.adapter import load_adapter, save_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.loading import load_model
from jaxglue.hf.merged_folder import export_adapter
from jaxglue.ops.segments import pack_segments

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
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (ADAPTER / name).read_bytes()


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
