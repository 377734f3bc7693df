"""Adapters on some layers and modules alone."""

import json

import pytest
from selection import repeats_parts_of

from jaxglue.hf.adapter import load_adapter
from jaxglue.training.train import train


@repeats_parts_of("test_kinds_left_out_stay_kinds_in_peft")
def test_layers_and_modules_left_out_have_no_adapter(make_config, tmp_path):
    settings = {"steps": 1, "layers": (1,), "exclude": ("up_proj", "1.self_attn.q_proj")}
    train(make_config(output=tmp_path / "first", **settings))
    folder = tmp_path / "first/adapter"
    adapter = load_adapter(folder)
    assert {name.removeprefix("model.layers.1.").partition(".lora")[0] for name in adapter.tensors} == {
        *(f"self_attn.{name}_proj" for name in "kvo"),
        *("mlp.gate_proj", "mlp.down_proj"),
    }
    named = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert len(named) == 5 and all(name.startswith("model.layers.1.") for name in named)
    base = {"model": str(tmp_path / "first/base"), "random_weights": False}
    train(make_config(output=tmp_path / "second", steps=1, adapter=folder, rank=16, **base))
    assert load_adapter(tmp_path / "second/adapter").tensors.keys() == adapter.tensors.keys()


def test_kinds_left_out_stay_kinds_in_peft(make_config, tmp_path):
    train(make_config(output=tmp_path / "run", steps=1, exclude=("up_proj", "k_proj")))
    named = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())["target_modules"]
    assert named == ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (0, 2)}, "layers: the model has 2 layers, 0 to 1, and no layer 2"),
        ({"exclude": ("up_prj",)}, r"exclude: up_prj do not exist in this model: use .*did you mean up_proj"),
        ({"targets": ("q_proj",), "exclude": ("q_proj",)}, "exclude and layers leave no linear layer to adapt"),
    ],
)
def test_names_of_nothing_are_refused(make_config, options, message):
    with pytest.raises(ValueError, match=message):
        train(make_config(steps=1, **options))
