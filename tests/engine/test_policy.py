"""Remat policies are parsed, formatted and checked, and decide a layer's residuals."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.engine.policy import PRESETS, RematPolicy, check_remat, format_policies, parse_policies, parse_policy
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.context import PackedContext
from jaxglue.ops import names
from jaxglue.ops.equations import equations, live_program
from jaxglue.ops.segments import pack_segments


@pytest.mark.parametrize(
    ("text", "saved", "offloaded"),
    [
        ("full", set(), set()),
        ("offload", set(), {"layer_input"}),
        ("offload:layer_input,attention_out; save:query,key", {"query", "key"}, {"layer_input", "attention_out"}),
        ("save: gate , up", {"gate", "up"}, set()),
        ("dots; offload:gate", set(names.LAYER_VALUES) - {"layer_input", "gate", "merged_weight"}, {"gate"}),
        ("offload; save:layer_input", set(), set()),
    ],
)
def test_policy_is_parsed_and_formatted(text, saved, offloaded):
    policy = parse_policy(text)
    assert policy == RematPolicy(saved=frozenset(saved), offloaded=frozenset(offloaded))
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_formatted_by_name(name):
    assert str(parse_policy(name)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dot", "remat policy 'dot' is unknown: use one of none, dots, full, offload, auto, or name values"),
        ("save:query,atention_out", "unknown values atention_out: use layer_input, query, key"),
        ("offload:gate; save:gate", "both saves and offloads gate"),
        ("keep:gate", "'keep:gate' must be save:NAME"),
        ("none; offload:gate", "gate cannot be offloaded or dropped: start from dots"),
    ],
)
def test_invalid_policy_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_policies_per_layer_are_parsed_and_formatted():
    assert parse_policies("offload", 3) == (parse_policy("offload"),) * 3
    for groups in ("2 x [2 x offload + 1 x none + 1 x full]", "1 x dots + 2 x [1 x offload + 2 x full] + 1 x none"):
        assert format_policies(parse_policies(groups, 8)) == groups
    text = "2 x offload:layer_input,gate + 1 x dots; offload:layer_input"
    policies = parse_policies(text, 3)
    assert policies[0] == policies[1] != policies[2] == parse_policy("dots; offload:layer_input")
    assert format_policies(policies) == text
    with pytest.raises(ValueError, match="is for 3 layers, the model has 4"):
        parse_policies(text, 4)
    with pytest.raises(ValueError, match="'full' must be COUNT x POLICY"):
        parse_policies("2 x dots + full", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("offload", "full"),
        ("offload:layer_input,gate; save:up", "save:gate,up"),
        ("drop:layer_input; offload:attention_out", "drop:layer_input; save:attention_out"),
        ("dots; offload:layer_input", "dots"),
    ],
)
def test_policy_keeps_the_same_values_on_the_device(text, expected):
    assert parse_policy(text).on_device() == parse_policy(expected)


def test_policies_are_interleaved():
    text = "5 x offload & 3 x dots"
    policies = parse_policies(text, 8)
    offload, dots = parse_policy("offload"), parse_policy("dots")
    assert policies == (offload, offload, dots, offload, offload, dots, offload, dots)
    assert format_policies(policies) == text
    assert format_policies(parse_policies("5 x offload + 3 x dots", 8)) == "5 x offload + 3 x dots"
    with pytest.raises(ValueError, match="is for 8 layers, the model has 9"):
        parse_policies(text, 9)
    with pytest.raises(ValueError, match="must spread one policy's layers among another's"):
        parse_policies("1 x full & 1 x dots & 1 x full", 3)


def test_remat_text_is_checked_without_a_model():
    for text in ("auto", "dots", "3 x dots + 2 x full"):
        check_remat(text)
    with pytest.raises(ValueError, match="'ful' is unknown"):
        check_remat("3 x dots + 2 x ful")


@pytest.fixture
def residuals_of(split_parts, random_batch):
    """The residuals of the first layer, as shapes, under a policy."""

    def make(policy: str):
        parts, batch = split_parts("lora"), random_batch([[5, 1, 7], [12]], 14)
        executor = parts.executor(policy)
        x, contexts = executor.entry_head.embed(parts.trainable, parts.frozen, batch, None)
        layers = parts.trainable["layers"][0], parts.frozen["layers"][0]
        return executor.layers[0].forward.eval_shape(*layers, x, contexts[0])[1]

    return make


def test_residuals_are_the_named_values_without_weights(residuals_of, split_parts):
    sizes = {name: residuals_of(name).saved for name in ("none", "dots", "full")}
    weights = {leaf.shape for leaf in jax.tree.leaves(split_parts("lora").frozen["layers"][0]) if leaf.ndim == 2}
    assert not weights & {value.shape for values in sizes.values() for value in values}
    assert sizes["full"] == []
    heads, kv_heads, wide, model = (2, 14, 64), (2, 14, 32), (2, 14, 48), (2, 14, 32)
    adapters = [(2, 14, 12), (2, 14, 4), (2, 14, 8), (2, 14, 4)]  # of query, key and value; output; gate and up; down
    expected = [heads, kv_heads, kv_heads, (2, 14, 4, 16), model, wide, wide, *adapters]
    assert sorted(value.shape for value in sizes["dots"]) == sorted(expected)
    assert sum(value.size for value in sizes["none"]) > sum(value.size for value in sizes["dots"])


def test_offloaded_residuals_are_separate(residuals_of):
    residuals = residuals_of("offload:layer_input,attention_out,up; save:query,gate")
    assert sorted(value.shape for value in residuals.offloaded) == [(2, 14, 4, 16), (2, 14, 48)]
    assert sorted(value.shape for value in residuals.saved) == [(2, 14, 48), (2, 14, 64)]


def test_a_kept_branch_is_not_multiplied_again_for_its_norm():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    others = {"model_type": "gemma3_text", "head_dim": 8, "vocab_size": 8, "num_hidden_layers": 1}
    config = config_from_hf({**sizes, **others})
    layer = build_model(config, rngs=nnx.Rngs(0)).layers[0]
    segments = pack_segments([[5, 3]], seq_len=8)
    context = PackedContext(segments=segments, rope=config.rope_tables(segments.positions))

    def matmuls(policy):
        run = parse_policy(policy).wrap(lambda x: layer(x, context))
        program = live_program(jax.make_jaxpr(jax.grad(lambda x: jnp.cos(run(x)).sum()))(jnp.ones((1, 8, 16))))
        return sum(equation.primitive.name == "dot_general" for equation, _ in equations(program.jaxpr))

    kept = "offload:layer_input,query,key,value,attention_residual,gate,up"
    assert matmuls(f"{kept},mlp_branch") == matmuls(kept) - 1
