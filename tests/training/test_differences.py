import pytest

from jaxglue.training.differences import check_fingerprint, differences

SAVED = {"optimizer": {"learning_rate": 2e-4, "clip_norm": 1.0}, "lora": {"rank": 8}, "steps": 10}


def test_fingerprints_compare_as_json():
    check_fingerprint({"columns": ["a"]}, {"columns": ("a",)})
    with pytest.raises(ValueError, match="rank: saved none, now 8\nUse the saved values, or start a new run"):
        check_fingerprint({}, {"rank": 8})


def test_a_nested_setting_is_named_by_its_key():
    now = SAVED | {"optimizer": {"learning_rate": 1e-4, "clip_norm": 1.0}}
    assert differences(SAVED, now) == {"optimizer.learning_rate": "saved 0.0002, now 0.0001"}
    assert differences(SAVED, SAVED | {"lora": None}) == {"lora": "saved given, now none"}


def test_a_long_value_is_cut():
    assert len(differences({"data": ["x" * 500]}, {"data": []})["data"]) < 120


def test_only_the_length_of_a_run_may_change():
    check_fingerprint(SAVED, SAVED | {"steps": 20})
