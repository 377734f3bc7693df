"""The cached reference: its name holds all that it depends on, and damage or staleness of any kind is noticed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.distributed import SINGLE_PROCESS
from jaxglue.hf.adapter import save_adapter
from jaxglue.models.parameters import flatten_names
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.training.reference_cache import _read, _weights, _write, add_reference
from jaxglue.training.setup import resolve
from jaxglue.training.step import prepare_steps


@pytest.fixture
def path(tmp_path):
    _write(tmp_path / "reference", np.arange(6, dtype=np.float32).reshape(3, 2))
    return tmp_path / "reference"


def test_written_values_are_read(path):
    assert _read(path, 3).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert _read(path, 2) is None
    assert _read(path.with_name("absent"), 3) is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 35, 52, 55])
def test_truncated_file_is_not_read(path, size):
    path.write_bytes(path.read_bytes()[:size])
    assert _read(path, 3) is None


@pytest.mark.parametrize("byte", [0, 31, 32, 55])
def test_flipped_bit_is_noticed(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)
    assert _read(path, 3) is None


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_not_believed(path, value):
    _write(path, np.full((3, 2), value, np.float32))
    assert _read(path, 3) is None


PAIRS = [{"prompt": f"What is {n} plus 1? ", "chosen": f"It is {n + 1}.", "rejected": "Good"} for n in range(5)]


@pytest.fixture
def make_run(make_config, write_jsonl):
    """Return (run, parts and state of its steps before step 1) of DPO with a cached reference."""
    data = (write_jsonl(PAIRS, "pairs.jsonl"),)

    def make(objective="dpo", **changes):
        config = make_config(data=data, steps=1, batch_size=2, **changes)
        objective = ObjectiveConfig(objective=objective, reference_cache="on")
        run = resolve(type(config)(**{**vars(config), "objective": objective}))
        return run, *prepare_steps(run, None)

    return make


def reference(run, parts, state):
    """Return the line of `add_reference` and the values that the run reads."""
    return add_reference(run, parts, state, SINGLE_PROCESS), run.batches.dataset.reference


def test_a_cached_reference_is_the_model_that_training_begins_with(make_run, tmp_path):
    run, _, state = make_run()
    rng = np.random.default_rng(0)
    tensors = {
        name: 0.1 * rng.standard_normal(x.shape, np.float32) for name, x in flatten_names(state.trainable).items()
    }
    save_adapter(tmp_path / "adapter", tensors, run.lora, run.base.name)
    changes = {"adapter": tmp_path / "adapter", "rank": 16}  # the adapter brings its own settings
    first, values = reference(*make_run(**changes))
    again, same = reference(*make_run(**changes))
    assert "written to" in first and "read from" in again
    np.testing.assert_array_equal(values, same)

    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 128}))
    scaled, others = reference(*make_run(**changes))
    assert "written to" in scaled and abs(others - values).max() > 1e-3


def test_names_follow_every_weight_but_not_new_adapters(make_run):
    run, parts, state = make_run()
    before = _weights(run, state)
    *_, other = make_run(rank=2)
    assert _weights(run, other) == before
    weight = state.frozen["layers"][1]["mlp"]["up_proj"]["weight"]
    state.frozen["layers"][1]["mlp"]["up_proj"]["weight"] = weight.at[3, 5].multiply(1.5)
    assert _weights(run, state) != before
    state.frozen["layers"][1]["mlp"]["up_proj"]["weight"] = weight.at[3, 5].set(jnp.nan)
    with pytest.raises(ValueError, match=r"not finite \(layers\.1\.mlp\.up_proj\.weight\)"):
        reference(run, parts, state)


def test_a_stale_reference_is_computed_anew(make_run, tmp_path):
    line, values = reference(*make_run())
    (path,) = (tmp_path / "cache").glob("reference-*")
    assert line == f"reference's log-probabilities: written to {path}"
    _write(path, values + np.float32(0.5))
    line, again = reference(*make_run())
    assert f"{path} differs from the first rows' log-probabilities under this model: computed anew" in line
    np.testing.assert_array_equal(again, values)
    np.testing.assert_array_equal(_read(path, len(values)), values)


def test_copies_of_the_prompt_have_the_same_reference(make_run, monkeypatch):
    _, shared = reference(*make_run())
    monkeypatch.setattr("jaxglue.training.row_source.why_prompts_are_copied", lambda *_: "no kernel of forked segments")
    run, *model = make_run()
    _, copied = reference(run, *model)
    assert not run.batches.dataset.task.shared_prompt
    np.testing.assert_allclose(copied, shared, atol=2e-3)
