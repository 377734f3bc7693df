import json
import resource
import time
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxglue.hf.checkpoint import load_tensors, open_checkpoint, read_config, save_tensors

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shapes = {
        EMBEDDING: (16, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.norm.weight": (8,),
        "lm_head.weight": (16, 8),
    }
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path, tensors):
    save_tensors(tmp_path / "model", tensors)
    return tmp_path / "model"


def specs(tensors, dtype=jnp.float32):
    return {name: jax.ShapeDtypeStruct(array.shape, dtype) for name, array in tensors.items()}


def rewrite(folder, change):
    content = load_file(folder / "model.safetensors")
    change(content)
    save_file(content, folder / "model.safetensors")


@pytest.mark.parametrize("max_shard_bytes", [10**9, 600, 1])
def test_round_trip(tmp_path, tensors, max_shard_bytes):
    save_tensors(tmp_path / "model", tensors, max_shard_bytes)
    loaded = load_tensors(tmp_path / "model", specs(tensors))
    assert list(loaded) == list(tensors)
    jax.tree.map(np.testing.assert_array_equal, loaded, tensors)


def test_shards_and_index_match_the_library(tmp_path, tensors):
    tensors |= {"model.norm.weight": tensors["model.norm.weight"].astype(jnp.bfloat16)}
    save_tensors(tmp_path / "model", tensors, 600)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "model").glob("*.safetensors")}
    assert set(shards) == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    for name, array in tensors.items():
        np.testing.assert_array_equal(shards[index["weight_map"][name]][name], array)


def test_casts_to_the_wanted_dtype(folder, tensors):
    loaded = load_tensors(folder, specs(tensors, jnp.bfloat16))
    for name, array in loaded.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, np.asarray(tensors[name]).astype(ml_dtypes.bfloat16))


def test_few_tensors_are_on_the_host_at_a_time(folder, tensors, monkeypatch):
    monkeypatch.setattr("jaxglue.hf.checkpoint._READERS", 2)
    alive: list[weakref.ref] = []

    def put(name, array):
        assert len([ref for ref in alive if ref() is not None]) < 2
        alive.append(weakref.ref(array))
        return array.copy()  # JAX's own copy would release its source some time later

    assert len(load_tensors(folder, specs(tensors), put)) == len(alive) == len(tensors)


def test_large_tensors_are_on_their_way_two_at_a_time(folder, tensors, monkeypatch):
    monkeypatch.setattr("jaxglue.hf.checkpoint._LARGE", 1)
    monkeypatch.setattr("jaxglue.hf.checkpoint._READERS", 4)
    active, most = [], []

    def put(name, array):
        active.append(name)
        time.sleep(0.02)
        most.append(len(active))
        active.remove(name)
        return array

    assert load_tensors(folder, specs(tensors), put).keys() == tensors.keys()
    assert max(most) <= 2


def test_put_receives_names_and_replaces_arrays(folder, tensors):
    kept = load_tensors(folder, specs(tensors), lambda name, array: (name, array.shape))
    assert kept == {name: (name, array.shape) for name, array in tensors.items()}


def test_every_wrong_tensor_is_named_in_one_message(folder, tensors):
    wanted = specs(tensors)
    wanted["model.layers.1.mlp.up_proj.weight"] = wanted.pop("model.layers.0.mlp.up_proj.weight")
    wanted["model.norm.weight"] = jax.ShapeDtypeStruct((9,), jnp.float32)
    with pytest.raises(ValueError) as error:
        load_tensors(folder, wanted)
    assert str(error.value).splitlines()[1:] == [
        "  1 missing: model.layers.1.mlp.up_proj.weight",
        "  1 not part of the model: model.layers.0.mlp.up_proj.weight in model.safetensors",
        "  1 of another shape: model.norm.weight in model.safetensors is [8], config.json says [9]",
    ]


def test_long_lists_are_counted(folder, tensors):
    wanted = specs(tensors) | {f"model.layers.{i}.x": jax.ShapeDtypeStruct((1,), jnp.float32) for i in range(9)}
    with pytest.raises(ValueError, match=r"9 missing: model.layers.0.x, .*model.layers.4.x, … and 4 more"):
        load_tensors(folder, wanted)


def test_tied_head_and_rotary_buffers_are_ignored(folder, tensors):
    def tie(content):
        content["lm_head.weight"] = content[EMBEDDING]
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    rewrite(folder, tie)
    wanted = specs(tensors)
    del wanted["lm_head.weight"]
    assert set(load_tensors(folder, wanted)) == set(wanted)


def test_tied_head_that_differs_is_refused(folder, tensors):
    wanted = specs(tensors)
    del wanted["lm_head.weight"]
    with pytest.raises(ValueError, match=r'lm_head.weight in .*differs from.*"tie_word_embeddings": false'):
        load_tensors(folder, wanted)


@pytest.mark.parametrize("keep", [4, 60, -1])
def test_truncated_file_is_named_before_anything_is_loaded(folder, tensors, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt .*copy it again"):
        load_tensors(folder, specs(tensors), put=lambda name, array: pytest.fail("loaded a tensor"))


def test_truncated_shard_is_named_before_anything_is_loaded(tmp_path, tensors):
    save_tensors(tmp_path / "model", tensors, 600)
    last = tmp_path / "model/model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"00003-of-00003.safetensors is truncated or corrupt"):
        load_tensors(tmp_path / "model", specs(tensors), put=lambda name, array: pytest.fail("loaded a tensor"))


def test_missing_shard_is_named(tmp_path, tensors):
    save_tensors(tmp_path / "model", tensors, 600)
    (tmp_path / "model/model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names model-00002-of-00003\.safetensors, which is not in"):
        open_checkpoint(tmp_path / "model")


def test_a_file_that_may_not_be_opened_is_told_from_a_missing_one(folder, monkeypatch):
    def refuse(path, framework):  # as safetensors does without permission
        raise FileNotFoundError(path)

    monkeypatch.setattr("jaxglue.hf.tensor_files.safe_open", refuse)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be opened: check its permissions"):
        open_checkpoint(folder)


def test_index_may_not_point_outside_its_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names ../elsewhere.safetensors, which is not in"):
        open_checkpoint(folder)


def test_index_and_shards_must_agree(folder):
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "model.gone": "a.safetensors"}}
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists tensors absent from all shards: model.gone"):
        open_checkpoint(folder)


def test_pickles_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pickles \(pytorch_model\.bin\).*save_pretrained"):
        open_checkpoint(tmp_path)


def test_unsupported_dtype_is_named(tmp_path):
    save_file({"model.norm.weight": np.ones(4, ml_dtypes.float8_e5m2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight in .* has dtype F8_E5M2"):
        open_checkpoint(tmp_path)


def test_failed_save_leaves_nothing(tmp_path, tensors):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(OSError, match="model was not written"):
            save_tensors(tmp_path / "model", tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_save_refuses_a_folder_in_use(folder, tensors):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is not empty"):
        save_tensors(folder, tensors)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json does not exist"),
        ("{", "malformed JSON at column 2"),
        ("[]", "JSON object, but holds a list"),
    ],
)
def test_read_config_explains_errors(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_read_config_needs_a_local_folder(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder.*nothing is downloaded"):
        read_config(tmp_path / "Qwen/Qwen3-0.6B")


def test_read_config_names_the_recipe_that_writes_a_folder():
    with pytest.raises(ValueError, match="run jaxglue train --recipe quickstart first"):
        read_config("runs/quickstart/base")
