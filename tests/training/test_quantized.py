"""Runs with quantized frozen weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.export import quantize_folder
from jaxglue.hf.loading import random_model
from jaxglue.hf.tensor_files import write_shards
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.quant.formats import FORMATS, is_quantized
from jaxglue.planner.memory import resident_bytes
from jaxglue.planner.workload import Workload, abstract_parts, parameter_counts
from jaxglue.training.explain import run_reasons
from jaxglue.training.report import plan_rows
from jaxglue.training.setup import resolve
from jaxglue.training.train import train
from jaxglue.training.weights import build_parameters


@pytest.fixture
def nf4_folder(model_folder):
    """Gives the model folder sizes that blocks divide."""
    path = model_folder / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return model_folder


@repeats_parts_of("test_quantized_folder_trains_like_the_flag")
@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_quantized_run_learns(make_config, nf4_folder, tmp_path, how):
    summary = train(make_config(steps=8, quantize=how, sample_prompt=("Hello",), sample_tokens=3))
    assert summary.last_loss < summary.first_loss - 0.2
    tensors = load_adapter(tmp_path / "run/adapter").tensors
    assert len(tensors) == 2 * 7 * 2
    assert all(np.abs(tensor).max() > 0 for tensor in tensors.values())


@repeats_parts_of("test_quantized_folder_trains_like_the_flag")
def test_layers_that_a_folder_leaves_unquantized_train_adapters(make_config, nf4_folder, tmp_path):
    path = nf4_folder / "config.json"
    entry = {"quantization_config": FORMATS["nf4"].config() | {"llm_int8_skip_modules": ["model.layers.1.mlp"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    run = resolve(make_config(steps=8))
    frozen = abstract_parts(run.workload)[2]["layers"]
    assert [is_quantized(layer["mlp"]["up_proj"]["weight"]) for layer in frozen] == [True, False]
    assert _specs(abstract_parts(run.workload)[2]) == _specs(build_parameters(run)[2])
    summary = train(make_config(steps=8))
    assert summary.last_loss < summary.first_loss - 0.2
    found = load_adapter(tmp_path / "run/adapter").unquantized
    assert {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")} <= set(found)
    assert all(name.startswith("model.layers.1.mlp.") for name in found)


@pytest.mark.parametrize(("how", "bytes_each"), [("nf4", 0.516), ("int8", 1.03)])
def test_plan_and_planner_count_stored_bytes(make_config, nf4_folder, how, bytes_each):
    plain, stored = (resolve(make_config(quantize=quantize)) for quantize in ("none", how))
    assert parameter_counts(plain.workload) == parameter_counts(stored.workload)
    assert plan_rows(stored)["dtype"] == f"float32, linear layers of the decoder layers in {how}"
    linears = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert _resident(plain) - _resident(stored) == pytest.approx(linears * (4 - bytes_each), rel=0.01)
    planned = abstract_parts(stored.workload)[2]
    assert _specs(planned) == _specs(build_parameters(stored)[2])


def test_explanation_says_how_projections_are_computed_and_why(make_config, nf4_folder):
    usual, dropping = (run_reasons(resolve(make_config(quantize="nf4", dropout=share))) for share in (0.0, 0.1))
    for reasons in (usual, dropping):
        assert reasons["projections"].choice == "reference"
        assert "not fp8: weights are not stored for FP8 products" in reasons["projections"].limit
    assert usual["feed-forward"].choice == "lora_swiglu"
    assert dropping["feed-forward"].limit.endswith("not lora_swiglu: dropout gives down's adapter an input of its own")


def _resident(setup):
    return resident_bytes(setup.workload).total()


def _tensors(model):
    arrays = flatten_names(split_model(model, nnx.Param)[1])
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}, arrays.get


def _specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_quantized_folder_trains_like_the_flag(make_config, nf4_folder, tmp_path):
    model = random_model(config_from_hf(read_config(nf4_folder)), dtype=jnp.float32)
    write_shards(nf4_folder, *_tensors(model), 10**9)
    quantize_folder(nf4_folder, tmp_path / "stored", "nf4")
    for path in nf4_folder.glob("tokenizer*"):
        assert (tmp_path / "stored" / path.name).is_file()
    config = make_config(steps=2, model=str(tmp_path / "stored"), random_weights=False)
    assert resolve(config).model.quantize == "nf4"
    flagged = make_config(steps=2, random_weights=False, quantize="nf4", output=tmp_path / "flagged")
    assert train(config).last_loss == train(flagged).last_loss
    with pytest.raises(ValueError, match=r"is quantized to nf4.*use --method lora, or the folder of the original"):
        resolve(make_config(model=str(tmp_path / "stored"), random_weights=False, method="full"))


def test_host_embeddings_of_what_trains_is_sampled_or_tied_are_refused(make_config):
    with pytest.raises(ValueError, match=r"--embeddings host: the output projection of .* is tied to the table"):
        resolve(make_config(embeddings="host"))
    with pytest.raises(ValueError, match="--embeddings host is not for --method full"):
        make_config(embeddings="host", method="full")
    with pytest.raises(ValueError, match="--embeddings host is not for --sample-prompt"):
        make_config(embeddings="host", sample_prompt=("Hi",))


@repeats_parts_of("test_table_of_embeddings_for_each_layer_gives_the_same_step_and_is_left_out_of_the_plan")
def test_host_embeddings_change_no_loss(make_config, nf4_folder, tmp_path):
    path = nf4_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    options = {"steps": 2, "quantize": "nf4", "eval_fraction": 0.2}
    host = make_config(**options, embeddings="host")
    device = make_config(**options, output=tmp_path / "device")
    results = [train(host), train(device)]
    assert results[0].last_loss == results[1].last_loss
    assert results[0].best_eval_loss == results[1].best_eval_loss
    assert _resident(resolve(device)) - _resident(resolve(host)) == 2 * 4 * 400 * 64  # table and head


def test_full_fine_tuning_is_refused(make_config, nf4_folder):
    with pytest.raises(ValueError, match=r"--quantize nf4 is not for --method full.*use --method lora"):
        make_config(quantize="nf4", method="full")
    with pytest.raises(ValueError, match="--quantize int8 is not for --method full"):
        make_config(quantize="int8", method="full")
    config = resolve(make_config(quantize="nf4")).model
    with pytest.raises(ValueError, match="quantize=nf4 holds frozen weights, and all train: use adapters"):
        Workload(config=config, batch_size=1, seq_len=8, lora=None)
