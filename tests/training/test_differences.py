import dataclasses
import hashlib
import json

import pytest

from jaxglue.data.config import AnswerTask
from jaxglue.models import config_from_hf
from jaxglue.models.delta_net import DeltaConfig
from jaxglue.models.latent import LatentConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.settings.config import stable_repr
from jaxglue.settings.recipe import as_dict, defaults_of
from jaxglue.training.fingerprint import check_fingerprint, differences, fingerprint_differences, model_digest
from jaxglue.training.optimizer import OptimizerConfig
from tests.models.test_family_goldens import read_golden

SAVED = {"optimizer": {"learning_rate": 2e-4, "clip_norm": 1.0}, "lora": {"rank": 8}, "steps": 10}


def test_fingerprints_compare_as_json():
    check_fingerprint({"columns": ["a"]}, {"columns": ("a",)})
    with pytest.raises(ValueError, match="rank: saved none, now 8\nUse the saved values, or start a new run"):
        check_fingerprint({}, {"rank": 8})
    with pytest.raises(ValueError, match=r"data: saved 'a', now 'b' \(digests of the rows' tokens: files, .* unread\)"):
        check_fingerprint({"data": "a"}, {"data": "b"})


def test_a_nested_setting_is_named_by_its_key():
    now = SAVED | {"optimizer": {"learning_rate": 1e-4, "clip_norm": 1.0}}
    assert differences(SAVED, now) == {"optimizer.learning_rate": "saved 0.0002, now 0.0001"}
    assert differences(SAVED, SAVED | {"lora": None}) == {"lora": "saved given, now none"}


def test_a_long_value_is_cut():
    assert len(differences({"data": ["x" * 500]}, {"data": []})["data"]) < 120


def test_only_the_length_of_a_run_and_limits_of_rewards_may_change():
    check_fingerprint(SAVED, SAVED | {"steps": 20})
    limits = {"reward_timeout": 60.0, "reward_memory": 8.0, "reward_workers": 2}
    for name in limits:
        check_fingerprint({"rollouts": limits}, {"rollouts": limits | {name: 4}})
    with pytest.raises(ValueError, match=r"rollouts.max_turns: saved none, now 4"):
        check_fingerprint({"rollouts": limits}, {"rollouts": limits | {"max_turns": 4}})


def identity(model):
    mapped = {"model": as_dict(model), "defaults": {"model": defaults_of(model)}, "model_digest": model_digest(model)}
    return json.loads(json.dumps(mapped))


@pytest.fixture
def model(tiny_config):
    return config_from_hf({"model_type": "qwen3", **tiny_config})


@pytest.fixture
def newer(model):
    """The same model in a version with one more field."""
    fields = [("new", int, dataclasses.field(default=0))]
    cls = dataclasses.make_dataclass("DecoderConfig", fields, bases=(type(model),), frozen=True, kw_only=True)
    return lambda new: cls(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)}, new=new)


def test_setting_that_one_version_lacks_is_at_its_default(model, newer):
    assert not fingerprint_differences(identity(model), identity(newer(0)))
    assert not fingerprint_differences(identity(newer(0)), identity(model))
    assert fingerprint_differences(identity(model), identity(newer(1))) == {"model.new": "saved 0, now 1"}
    assert fingerprint_differences(identity(newer(1)), identity(model)) == {"model.new": "saved 1, now 0"}


def test_changed_default_is_a_difference(model, newer):
    saved, now = identity(newer(0)), identity(newer(1))
    now["defaults"]["model"]["new"] = 1
    assert fingerprint_differences(saved, now) == {"model.new": "saved 0, now 1"}


def test_models_saved_as_digests_are_compared_as_such(model, newer):
    digest = hashlib.sha256(repr(model).encode()).hexdigest()[:16]
    assert not fingerprint_differences({"model": digest}, identity(model))
    assert not fingerprint_differences({"model": digest}, identity(newer(0)))
    other = identity(dataclasses.replace(model, rms_norm_eps=0.5))
    assert list(fingerprint_differences({"model": digest}, identity(newer(1)))) == ["model"]
    assert list(fingerprint_differences({"model": digest}, other)) == ["model"]


def test_digested_representation_of_a_task_is_the_first_one():
    assert stable_repr(AnswerTask(), AnswerTask._fields) == repr(AnswerTask())
    assert stable_repr(AnswerTask(labeled=True), ()) == "AnswerTask(labeled=True)"


def test_records_of_runs_that_had_the_settings_of_all_kinds_are_the_same():
    groups = {
        "objective": ObjectiveConfig(objective="reward", center_rewards_coefficient=0.01),
        "optimizer": OptimizerConfig(learning_rate=1e-4),
    }
    current = {name: as_dict(group) for name, group in groups.items()}
    current["defaults"] = {name: defaults_of(group) for name, group in groups.items()}
    saved = {
        "objective": current["objective"] | {"beta": 0.1, "simpo_gamma": 0.5, "epsilon_high": "none"},
        "optimizer": current["optimizer"] | {"beta2": "none"},
        "defaults": {"objective": {"beta": "none", "simpo_gamma": 0.5, "epsilon_high": "none"}, "optimizer": {}},
    }
    assert not fingerprint_differences(saved, current)
    saved["objective"]["center_rewards_coefficient"] = 0.0
    assert [*fingerprint_differences(saved, current)] == ["objective.center_rewards_coefficient"]


EARLIER = {
    "attention": {"output_bias": "attention_output_bias", "head_norms": "head_norms", "scale": "attention_scale"},
    "scales": {
        "embedding": "embedding_multiplier",
        "residual": "residual_multiplier",
        "logit_divisor": "logit_divisor",
    },
}
"""Names of groups of a model's settings in versions that had no groups."""
EARLIER["attention"]["softcap"] = "attention_softcap"
EARLIER["scales"] |= {name: name for name in ("logit_divisor", "logit_softcap")}


@pytest.mark.parametrize("name", ["gemma2", "granite", "gemma4_text", "qwen3_5_moe_text", "deepseek_v2"])
def test_models_that_earlier_versions_saved_are_those_of_today(name):
    model = config_from_hf(read_golden(name)[0])
    now = json.loads(json.dumps({"model": as_dict(model), "defaults": {"model": defaults_of(model)}}))
    new = now["model"]
    old = {name: value for name, value in new.items() if name not in (*EARLIER, "mixers", "family_shape")}
    old |= {before: new[group][today] for group, names in EARLIER.items() for today, before in names.items()}
    old |= {"layer_shapes": [], "shared_width": 0, "per_layer": "none", "latent": "none", "delta": "none"}
    old |= new["family_shape"] if isinstance(new["family_shape"], dict) else {}
    if (latent := model.mixer_of(LatentConfig)) is not None:
        old["latent"] = as_dict(latent)
    if (delta := model.mixer_of(DeltaConfig)) is not None:
        old["delta"] = {**as_dict(delta), "layers": [mixer.recurrent for mixer in model.mixers]}
    saved = {**now, "model": old}
    assert not fingerprint_differences(saved, now)
    other = {**saved, "model": {**old, "embedding_multiplier": 7.0, "delta": "none", "latent": "none"}}
    assert "model.scales.embedding" in fingerprint_differences(other, now)
