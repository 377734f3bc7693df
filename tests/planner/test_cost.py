"""Cost of small programs against hand-computed seconds and bytes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxglue.ops.backend import HOPPER, tracing_for
from jaxglue.ops.equations import equations, live_program
from jaxglue.ops.kernel_cost import KernelCost, KernelKind, stand_in, stated_cost
from jaxglue.ops.moe import moe_mlp, route
from jaxglue.planner.cost import AttentionCost, program_cost
from jaxglue.planner.gpus import Gpu
from jaxglue.planner.live_bytes import Kernel, Value, peak_bytes

SLOW_MATMULS = Gpu(name="test", capability=(9, 0), memory=1e9, matmul=1e6, copy=1e12, link=1e9, peers=1e9)
SQUARE = 64 * 64 * 4


TABLE = np.arange(64.0, dtype=np.float32)


def cost(function, *shapes, attention=None, gpu=SLOW_MATMULS):
    arguments = [jnp.zeros(shape) for shape in shapes]
    return program_cost(jax.make_jaxpr(function)(*arguments), gpu, attention=attention or {})


def test_matmuls_take_their_flops():
    one = cost(lambda x, w: x @ w, (64, 64), (64, 64))
    assert one.seconds == pytest.approx(2 * 64**3 / 1e6, rel=1e-3)
    assert (one.temporary, one.results) == (0, SQUARE)
    repeated = cost(lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0], (64, 64), (64, 64))
    assert repeated.seconds == pytest.approx(5 * one.seconds, rel=1e-3)


def test_16_bit_matmuls_of_broken_tiles_copy_what_they_pad():
    def product(columns, dtype):
        arguments = jnp.zeros((64, 64), dtype), jnp.zeros((columns, 64), dtype)
        program = jax.make_jaxpr(lambda x, w: jnp.matmul(x, w.T, preferred_element_type=jnp.float32))(*arguments)
        return program_cost(program, SLOW_MATMULS, attention={}).temporary

    whole, broken = product(64, jnp.bfloat16), product(59, jnp.bfloat16)
    assert broken - whole == pytest.approx(64 * 64 * (2 + 4), abs=2 * 5 * 64)  # padded weight and logits
    assert product(59, jnp.float32) < product(64, jnp.float32)


def test_capped_logits_are_written_beside_those_before_the_cap():
    """Gemma 2's head was planned at 3.40 GiB and took 3.88."""
    logits = 4 * 64 * 64
    plain = cost(lambda x, w: _shifted_sums(x @ w), (64, 64), (64, 64))
    capped = cost(lambda x, w: _shifted_sums(jnp.tanh(x @ w)), (64, 64), (64, 64))
    assert plain.temporary < 1.2 * logits and capped.temporary == pytest.approx(2 * logits, rel=0.2)


def _shifted_sums(logits):
    return jnp.exp(logits - logits.max(1, keepdims=True)).sum(1)


def test_short_kernels_take_longer_than_their_work():
    fast = replace(SLOW_MATMULS, matmul=1e15)
    assert cost(lambda x, w: x @ w, (64, 64), (64, 64), gpu=fast).seconds == pytest.approx(3.6e-6, rel=0.02)
    assert cost(lambda x: jnp.sum(x), (64,), gpu=fast).seconds == pytest.approx(1.1e-6, rel=0.02)


def test_fused_values_take_no_memory():
    fused = cost(lambda x, w: jnp.tanh(jnp.exp(x @ w) + 1), (64, 64), (64, 64))
    assert fused.temporary == 0  # computed in place of the matmul's result
    chain = cost(lambda x, w: jnp.tanh(x @ w) @ w, (64, 64), (64, 64))
    assert chain.temporary == 2 * SQUARE  # the first product, and its tanh as the second one's operand


def test_matmul_accumulates_in_place():
    assert cost(lambda x, w: x @ w + w @ x, (64, 64), (64, 64)).temporary == 0


def test_a_loop_adds_to_its_carry_from_temporary_memory():
    def total(carry, rows):
        return jax.lax.scan(lambda carry, row: (carry + jnp.cumsum(row, axis=0), None), carry, rows)[0]

    assert cost(lambda carry, row: carry + jnp.cumsum(row, axis=0), (64, 64), (64, 64)).temporary == 0
    assert cost(total, (64, 64), (2, 64, 64)).temporary == SQUARE


def test_a_loop_of_one_turn_adds_nothing_to_its_zeros():
    def total(x, w, turns=1):
        return jax.lax.scan(lambda total, _: (total + x @ w, None), jnp.zeros((64, 64)), length=turns)[0]

    square = (64, 64), (64, 64)
    assert cost(total, *square) == cost(jnp.dot, *square)
    assert cost(partial(total, turns=2), *square).seconds > 2 * cost(total, *square).seconds


def test_loops_results_are_not_overwritten():
    def loop(x, w):
        return jax.lax.map(lambda row: row @ w, x)

    shapes = (64, 64), (64, 64)
    assert cost(lambda x, w: jnp.tanh(loop(x, w)), *shapes).temporary == SQUARE + SQUARE // 64  # and a row
    assert cost(lambda x, w: jnp.tanh(x @ w), *shapes).temporary == 0


def test_attention_takes_the_given_time():
    attention = {KernelKind.ATTENTION_FORWARD: AttentionCost(seconds=0.5, workspace=7)}
    forward = KernelCost(kind=KernelKind.ATTENTION_FORWARD)
    foreseen = cost(lambda x: stand_in(forward, [x], [x]), (64, 64), attention=attention)
    assert foreseen.seconds == pytest.approx(0.5, rel=1e-3)
    assert foreseen.temporary == 7


def test_attention_gradients_take_the_places_of_values_but_not_of_arguments():
    def kernel(x, y):
        return stand_in(KernelCost(kind=KernelKind.ATTENTION_BACKWARD), [x, y], [x, y])

    def temporary(in_place: bool) -> int:
        attention = {KernelKind.ATTENTION_BACKWARD: AttentionCost(seconds=0.0, in_place=in_place)}
        return cost(lambda x, y: sum(z.sum() for z in kernel(x @ x, y)), *[(64, 64)] * 2, attention=attention).temporary

    assert temporary(False) - temporary(True) == SQUARE


def test_platform_choice_counts_the_cuda_branch():
    def either(x, w):
        return jax.lax.platform_dependent(x, w, cuda=jnp.dot, default=lambda x, w: x)

    shapes = (64, 64), (64, 64)
    assert cost(either, *shapes).seconds == pytest.approx(cost(jnp.dot, *shapes).seconds)


def test_results_that_nothing_needs_cost_nothing():
    def first(count):
        return lambda x, w: jax.checkpoint(lambda x: [x @ w, *[w @ x] * (count - 1)])(x)[0]

    assert cost(first(1), (64, 64), (64, 64)) == cost(first(2), (64, 64), (64, 64))


def test_kernels_of_one_result_run_before_the_next():
    recomputed, large, small = Value(10), Value(100), Value(1)
    first, second = Value(1), Value(1)
    kernels = [
        Kernel((), (recomputed,), 0),
        Kernel((), (large,), 0),
        Kernel((large,), (first,), 0),
        Kernel((recomputed,), (small,), 0),
        Kernel((small,), (second,), 0),
    ]
    results = first, second
    assert peak_bytes(kernels, without={*results}, results=results) == 100
    assert peak_bytes(kernels, without={*results}, results=results, in_order=True) == 110
    assert peak_bytes(kernels[:1] + kernels[3:], without={second}, results=[second]) == 11


def test_values_of_one_large_array_are_formed_together():
    left, right, made = Value(100, is_argument=True), Value(100), Value(100)
    other, gradient = Value(100), Value(1)
    kernels = [
        Kernel((left,), (made,), 0, fused=True),
        Kernel((made,), (gradient,), 0),
        Kernel((), (right,), 0),
        Kernel((left, right), (other,), 0, fused=True),
    ]
    assert peak_bytes(kernels, without={gradient, other}, results=[gradient, other]) == 200


def test_values_that_are_formed_together_need_the_arrays_of_both():
    shared, first, second, one, other = Value(100, is_argument=True), *(Value(100) for _ in range(4))
    kernels = [
        Kernel((), (first,), 0),
        Kernel((shared, first), (one,), 0, fused=True),
        Kernel((), (second,), 0),
        Kernel((shared, second), (other,), 0, fused=True),
    ]
    assert peak_bytes(kernels, without=set(), results=[one, other]) == 400


@pytest.mark.parametrize(("constant", "turns", "formed"), [(2.0, 1, 1), (TABLE, 1, 2), (TABLE, 2, 1)])
def test_equal_conversions_of_weights_are_formed_once(constant, turns, formed):
    def seconds(convert):
        def products(x, codes):
            return x @ convert(codes) + x @ convert(codes)

        def repeated(x, codes):
            return jax.lax.scan(lambda x, _: (products(x, codes), None), x, length=turns)[0]

        slow_copies = replace(SLOW_MATMULS, matmul=1e18, copy=1e6)
        return cost(repeated, (64, 64), (64, 64), gpu=slow_copies).seconds / turns

    found = seconds(lambda codes: codes * np.array(constant)) - seconds(lambda codes: codes)
    assert found == pytest.approx(formed * 2 * SQUARE / 1e6, rel=0.02)


def test_attention_needs_all_that_it_is_given():
    backward = KernelCost(kind=KernelKind.ATTENTION_BACKWARD)
    arrays = jnp.ones((4, 4)), jnp.ones(4)
    program = jax.make_jaxpr(lambda x, dout: stand_in(backward, [x @ x, dout], [dout]))(*arrays)
    assert any(eqn.primitive.name == "dot_general" for eqn in live_program(program).jaxpr.eqns)


def test_gathered_rows_are_read_once_for_each_of_their_experts():
    pytest.importorskip("jax_triton", reason="the kernels of experts are traced")
    (M, D, F, E), shaped = (1024, 256, 128, 4), partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arrays = shaped((M, D)), shaped((M, E)), shaped((E, D, 2 * F)), shaped((E, F, D))

    def moved(X: int) -> int:
        with tracing_for(HOPPER):
            program = jax.make_jaxpr(lambda x, logits, *weights: moe_mlp(x, route(logits, X), *weights))(*arrays)
        costs = (stated_cost(eqn) for eqn, _ in equations(program.jaxpr))
        return next(cost for cost in costs if cost and cost.kind == KernelKind.EXPERTS_MATMUL).bytes

    assert [moved(X) for X in (1, 4)] == [2 * (E * D * 2 * F + X * M * (D + 2 * F)) for X in (1, 4)]
