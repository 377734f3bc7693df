import gc
import logging
import random
import resource
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.training import checkpoint
from jaxglue.training.checkpoint import Checkpoints, NonFinite, reason_of
from jaxglue.training.checkpoint_export import choose_step

FINGERPRINT = {"model": "tiny", "data": "0a1b", "seed": 0}


def make_state(seed: int):
    key = jax.random.key(seed)
    params = {"a": jax.random.normal(key, (8, 4)), "b": jax.random.normal(key, (5,), jnp.bfloat16)}
    key_data = jax.random.key_data(key)
    return {"trainable": params, "optimizer": optax.adamw(1e-3).init(params), "key": key_data, "step": jnp.int32(seed)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def save_all(folder, steps, **options):
    with Checkpoints(folder, fingerprint=FINGERPRINT, **options) as checkpoints:
        for step, eval_loss in steps.items():
            checkpoints.save(step, make_state(step), {"epoch": step / 2}, eval_loss=eval_loss)


def kept(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def restore(folder, fingerprint=FINGERPRINT):
    with Checkpoints(folder, fingerprint=fingerprint) as checkpoints:
        return checkpoints.restore_latest(abstract(make_state(0)))


def test_latest_checkpoint_is_restored_bit_for_bit(tmp_path):
    save_all(tmp_path, {1: None, 2: None})
    state, host, step, _ = restore(tmp_path)
    assert_same(state, make_state(2))
    assert (host, step) == ({"epoch": 1.0}, 2)


def test_empty_folder_restores_nothing(tmp_path):
    assert restore(tmp_path / "new") is None


def test_latest_two_and_best_are_kept_across_a_resume(tmp_path):
    save_all(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: None})
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        checkpoints.restore_latest(abstract(make_state(0)))
        checkpoints.save(5, make_state(5), {}, eval_loss=float("nan"))
        checkpoints.save(6, make_state(6), {}, eval_loss=1.5)
    assert kept(tmp_path) == [2, 5, 6]


def test_state_may_be_donated_during_a_save(tmp_path):
    overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
    state = {"a": jnp.full((1_000_000,), 7.0)}
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        checkpoints.save(1, state, {})
        state = jax.block_until_ready({"a": overwrite(state["a"])})
        checkpoints.wait()
        restored = checkpoints.restore_latest(abstract(state))
    assert (restored.state["a"] == 7).all()


def test_position_may_change_during_a_save(tmp_path):
    host, state = {"spikes": {"steps": [1]}}, make_state(1)
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        checkpoints.save(1, state, host)
        host["spikes"]["steps"] += range(100_000)
    assert restore(tmp_path).host == {"spikes": {"steps": [1]}}


def test_states_that_are_not_finite_are_not_saved(tmp_path):
    save_all(tmp_path, {1: None})
    state = make_state(2)
    moments = state["optimizer"][0]
    bad = moments._replace(nu=moments.nu | {"a": moments.nu["a"].at[3, 1].set(jnp.nan)})
    refusal = pytest.raises(NonFinite, match=r"1 arrays are not finite, the first of them optimizer\S+nu\S*a")
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints, refusal:
        checkpoints.save(2, state | {"optimizer": (bad, *state["optimizer"][1:])}, {})
    assert kept(tmp_path) == [1]


@pytest.fixture
def frozen_objects():
    """Spare what earlier tests left from the collections after damaged reads, each of which would take a second."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("frozen_objects")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
@pytest.mark.parametrize("damage", [repeat("truncate"), "delete"])
def test_any_damaged_file_still_restores_a_whole_checkpoint(tmp_path, damage, caplog):
    save_all(tmp_path / "good", {1: 2.0, 2: 1.0})
    files = [path.relative_to(tmp_path / "good") for path in (tmp_path / "good" / "2").rglob("*") if path.is_file()]
    skipped = 0
    for file in files:
        folder = tmp_path / "damaged" / file.name
        _copy_tree(tmp_path / "good", folder)
        if damage == "truncate":
            (folder / file).write_bytes((folder / file).read_bytes()[: (folder / file).stat().st_size // 2])
        else:
            (folder / file).unlink()
        state, _, step, _ = restore(folder)
        assert_same(state, make_state(step))
        skipped += step == 1
    assert skipped >= 3, "array data, manifest and host state cannot all be spared"
    assert "2 is damaged, trying the one before" in caplog.text


@repeats_parts_of("test_any_damaged_file_still_restores_a_whole_checkpoint")
@pytest.mark.usefixtures("frozen_objects")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
def test_flipped_bits_never_restore_another_state(tmp_path, pytestconfig):
    """Flip one bit of any file; the newest checkpoint is restored whole, or the one before."""
    save_all(tmp_path / "good", {1: None, 2: None})
    files = sorted(
        path.relative_to(tmp_path / "good") for path in (tmp_path / "good" / "2").rglob("*") if path.is_file()
    )
    rng, fallen_back = random.Random(0), 0
    for number in range(pytestconfig.getoption("--flips")):
        folder, file = tmp_path / str(number), files[number % len(files)]
        _copy_tree(tmp_path / "good", folder)
        content = bytearray((folder / file).read_bytes() or b"\0")
        bit = rng.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        (folder / file).write_bytes(content)
        state, host, step, _ = restore(folder)
        assert_same(state, make_state(step))
        assert host == {"epoch": step / 2}
        fallen_back += step == 1
    assert fallen_back >= 5


def test_a_checkpoint_that_is_left_out_is_an_error(tmp_path):
    """Orbax saves no step that it has saved, though its folder is gone: nobody may be told that it is there."""
    told = []
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT, saved=told.append) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(OSError, match=r"step 1 could not be written .* had been saved there, and is gone"):
            checkpoints.save(1, make_state(1), {})
    assert told == [tmp_path / "1"]


def test_published_checkpoint_is_synced_before_its_name(tmp_path, monkeypatch):
    synced, sync = [], checkpoint.sync
    monkeypatch.setattr(checkpoint, "sync", lambda path: (synced.append(path), sync(path)))
    save_all(tmp_path, {1: None})
    published = synced.index(tmp_path)
    names = {path.name for path in synced[:published]}
    assert {path.name for path in (tmp_path / "1").rglob("*")} <= names


def _copy_tree(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def test_damaged_checkpoint_is_set_aside_and_rewritten(tmp_path, caplog):
    save_all(tmp_path, {1: None, 2: None})
    (tmp_path / "2" / "meta" / "metadata").write_text("{")
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints, caplog.at_level(logging.WARNING):
        assert checkpoints.restore_latest(abstract(make_state(0))).step == 1
        checkpoints.save(2, make_state(5), {})
        checkpoints.wait()
        assert_same(checkpoints.restore_latest(abstract(make_state(0))).state, make_state(5))
    assert (tmp_path / "2.damaged").is_dir()


def test_only_damaged_checkpoints_raise_and_stay(tmp_path):
    save_all(tmp_path, {1: None})
    (tmp_path / "1" / "meta" / "metadata").write_text("{")
    with pytest.raises(ValueError, match=r"none of the checkpoints \[1\] in .* can be read"):
        restore(tmp_path)
    assert kept(tmp_path) == [1]


def test_full_disk_is_explained_and_spares_earlier_ones(tmp_path):
    state = {"a": jax.random.normal(jax.random.key(0), (100_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            checkpoints.save(2, state, {})
            with pytest.raises(OSError, match=r"step 2 could not be written to .*: File too large.*intact: \[1\]"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert kept(tmp_path) == [1]
        assert_same(checkpoints.restore_latest(abstract(state)).state, state)


def test_a_full_disk_at_the_first_checkpoint_offers_no_resume(tmp_path):
    state = {"a": jax.random.normal(jax.random.key(0), (100_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            with pytest.raises(OSError, match=r"has no earlier one. Make room, then start it again") as error:
                checkpoints.save(1, state, {})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--resume" not in str(error.value)


def test_remains_of_a_killed_save_are_removed(tmp_path):
    save_all(tmp_path, {1: None})
    (tmp_path / "1").rename(tmp_path / "2.orbax-checkpoint-tmp")
    save_all(tmp_path, {3: None})
    assert kept(tmp_path) == [3]


@pytest.mark.parametrize(("key", "value"), [("model", "other"), ("data", "ffff"), ("seed", 1)])
def test_resuming_another_run_names_the_difference(tmp_path, key, value):
    save_all(tmp_path, {1: None})
    with pytest.raises(ValueError, match=f"{key}: saved {FINGERPRINT[key]!r}, now {value!r}"):
        restore(tmp_path, FINGERPRINT | {key: value})


def test_best_checkpoint_is_restored(tmp_path):
    save_all(tmp_path, {1: 3.0, 2: 2.0, 3: 2.5, 4: None})
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        restored = checkpoints.restore_best(abstract(make_state(0)))
    assert restored.step == 2
    assert_same(restored.state, make_state(2))


def test_best_checkpoint_needs_an_eval_loss(tmp_path):
    save_all(tmp_path, {1: None})
    with (
        Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints,
        pytest.raises(ValueError, match="use --keep last"),
    ):
        checkpoints.restore_best(abstract(make_state(0)))


@pytest.mark.parametrize("metric", ["5", '{"eval_loss": "low"}', '{"eval_loss": NaN}', "[" * 5000])
def test_damaged_eval_loss_counts_as_none(tmp_path, metric):
    save_all(tmp_path, {1: 1.0, 2: 0.5})
    (tmp_path / "2/metrics/metrics").write_text(metric)
    assert restore(tmp_path).step == 2
    with Checkpoints(tmp_path, fingerprint=FINGERPRINT) as checkpoints:
        assert checkpoints.restore_best(abstract(make_state(0))).step == 1
    assert choose_step(tmp_path, "best") == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("NOT_FOUND: Error opening: Checksum differs [tensorstore_spec='{}']"), "Checksum differs"),
        (
            Exception("Error reading index: (slice(0, 3, 1),). See full TensorStore details: <bound method spec of {"),
            "Error reading index: (slice(0, 3, 1),)",
        ),
    ],
)
def test_storage_errors_are_cut_to_their_cause(error, reason):
    assert reason_of(error) == reason


def test_abandoned_reads_of_orbax_are_silent():
    heard = []

    async def ours():
        pass

    coroutine = ours()
    abandoned = SimpleNamespace(cr_code=SimpleNamespace(co_filename="/site-packages/orbax/checkpoint/x.py"))
    for thing, error in ((abandoned, "cut"), (coroutine, "Event loop is closed"), (coroutine, "another")):
        unraisable = SimpleNamespace(object=thing, exc_value=Exception(error))
        checkpoint._print_unless_abandoned(lambda one: heard.append(str(one.exc_value)), unraisable)
    coroutine.close()
    assert heard == ["another"]
