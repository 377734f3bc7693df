"""Attention's foreseen cost, as a function of documents' lengths."""

from dataclasses import replace

import numpy as np
import pytest
from selection import repeat

from jaxglue.models import config_from_hf
from jaxglue.models.config import AttentionOptions, LayerShape
from jaxglue.models.gemma4 import Gemma4Shape
from jaxglue.models.latent import LatentConfig
from jaxglue.models.lora_config import LoraConfig
from jaxglue.ops.backend import has_jax_triton
from jaxglue.ops.kernel_cost import KernelKind
from jaxglue.planner.attention import (
    attention_backend,
    attention_costs,
    layer_attention_costs,
    visible_pairs,
    with_fitting_attention,
)
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.workload import Workload, sample_lengths, sample_micro_batches
from jaxglue.sharding.mesh import MeshShape

H200 = find_gpu("H200")


@pytest.fixture(scope="module")
def workload(tiny_config):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = config_from_hf({**tiny_config, **sizes, "model_type": "qwen3"})
    return Workload(config=config, batch_size=1, seq_len=16_384, lora=LoraConfig())


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_visible_pairs_are_counted(window):
    lengths = [1, 2, 7]
    pairs = sum(min(token, window or token) for length in lengths for token in range(1, length + 1))
    assert visible_pairs(lengths, window) == pairs


def test_samples_keep_the_mean_and_the_longest():
    lengths = np.random.default_rng(0).lognormal(6, 1, 50_000).astype(int)
    sample = np.array(sample_lengths(lengths))
    assert len(sample) == 1024
    assert (sample**2).sum() / sample.sum() == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.02)
    assert sample_lengths(lengths[:3]) == tuple(lengths[:3])


def test_micro_batches_are_told_apart_by_their_kernels():
    mixed = (10_000, *[100] * 300)
    kinds = sample_micro_batches(mixed, seq_len=10_000, batch_size=1)
    assert [(kind.kind, kind.batches) for kind in kinds] == [((False, 128), 3), ((True, 4), 1)]
    assert sum(kind.share for kind in kinds) == 1
    assert sum(sum(kind.lengths) for kind in kinds) == sum(mixed)
    (whole,) = sample_micro_batches((), seq_len=512, batch_size=3)
    assert (whole.lengths, whole.batches, whole.kind) == ((512,) * 3, 1, (False, 1))
    (cut,) = sample_micro_batches((9000,), seq_len=512, batch_size=1)
    assert cut.lengths == (512,)


def test_time_grows_with_documents_lengths(workload):
    lengths = [64, 512, 2048, 16_384]
    costs = [attention_costs(replace(workload, document_lengths=(n,)), H200, None) for n in lengths]
    for name in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD):
        seconds = [cost[name].seconds for cost in costs]
        assert seconds == sorted(seconds)
        rates = [visible_pairs([n] * (16_384 // n)) / time for n, time in zip(lengths, seconds, strict=True)]
        assert rates == sorted(rates)


@pytest.mark.skipif(not has_jax_triton(), reason="without jax-triton, auto takes cudnn")
def test_long_documents_are_costed_as_their_kernels(workload):
    def kernel(gpu="H200", window=None, **changes):
        work = replace(workload, **changes)
        return [attention_backend(work, find_gpu(gpu), batches.kind, window) for batches in work.micro_batches]

    assert kernel() == kernel(document_lengths=(8192,)) == ["hopper"]
    assert kernel(seq_len=65_536, document_lengths=(8192,)) == ["hopper"]
    assert kernel(gpu="B200") == ["cudnn"]
    assert kernel(document_lengths=(2048,)) == kernel(gpu="A100") == kernel(window=128) == ["triton"]


@pytest.mark.skipif(not has_jax_triton(), reason="without jax-triton, auto takes cudnn")
def test_workspaces_are_costed(workload):
    def backward(**changes):
        work = replace(workload, document_lengths=(8192,), **changes)
        return attention_costs(work, H200, None)[KernelKind.ATTENTION_BACKWARD]

    def workspace(**changes):
        return backward(**changes).workspace

    assert workspace(attention="cudnn") == 8 * 2 * 16_384 * 32 * 128
    assert workspace() == 4 * 16_384 * 32 * 128
    assert workspace(attention="hopper", seq_len=524_288) == 2**30  # of one key/value head after another
    assert [backward(attention="hopper", seq_len=n).in_place for n in (16_384, 524_288)] == [False, True]
    # Of rows on two GPUs also the keys and values of both, and their gradients (as compiled for two H200s).
    split = {"attention": "hopper", "seq_len": 2**20, "mesh": MeshShape(context=2)}
    assert workspace(**split) == 2**30 + 2 * 2**32 and backward(**split).in_place


@pytest.mark.skipif(not has_jax_triton(), reason="without jax-triton, auto takes cudnn")
def test_workspaces_are_bounded_by_the_gpus_memory(workload):
    two = replace(workload, document_lengths=(8192,))
    for gpu, kernels in ((H200, ["auto", "auto", "triton"]), (find_gpu("B200"), ["auto", "triton", "triton"])):
        assert [with_fitting_attention(two, gpu.limited(gib)).attention for gib in (10, 7, 2)] == kernels


def test_layers_are_costed_by_their_own_heads(workload):
    config = workload.config
    shapes = [LayerShape(head_dim, 8, config.intermediate_size) for head_dim in (128, 256, 512)]
    sizes = Gemma4Shape(layer_shapes=tuple(shapes), shared_width=0, per_layer=None)
    own = replace(config, num_hidden_layers=3, layer_windows=(None,) * 3, family_shape=sizes)
    work = replace(workload, config=own, document_lengths=(1024,))
    costs = [layer_attention_costs(work, H200, index)[KernelKind.ATTENTION_BACKWARD].seconds for index in range(3)]
    assert costs[0] == attention_costs(work, H200, None)[KernelKind.ATTENTION_BACKWARD].seconds
    assert costs[2] > 1.9 * costs[1] > 1.9 * 1.9 * costs[0]


def test_capped_scores_and_wide_heads_have_no_sums_of_queries(workload):
    for changes in ({"attention": AttentionOptions(softcap=50.0)}, {"head_dim": 256, "num_attention_heads": 16}):
        work = replace(workload, config=replace(workload.config, **changes), attention="hopper")
        cost = attention_costs(work, H200, None)[KernelKind.ATTENTION_BACKWARD]
        assert (cost.workspace, cost.in_place) == (0, False)


def test_short_rows_wait_for_the_longest_program(workload):
    def seconds(tokens: int, **config) -> list[float]:
        work = replace(workload, seq_len=tokens, config=replace(workload.config, **config))
        return [
            attention_costs(work, H200, None)[name].seconds
            for name in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)
        ]

    (forward, backward), few = seconds(1024), seconds(1024, num_key_value_heads=2)
    assert few[0] == forward and few[1] > 2 * backward  # a program has the gradients of all queries of a key
    assert sum(seconds(64)) == pytest.approx(20e-6, rel=0.2)


@pytest.mark.skipif(not has_jax_triton(), reason="without jax-triton, auto takes cudnn")
def test_few_long_programs_leave_multiprocessors_idle(workload):
    def seconds(kv_heads: int, seq_len: int) -> float:
        config = replace(workload.config, num_key_value_heads=kv_heads)
        work = replace(workload, seq_len=seq_len, config=config, attention="hopper")
        return attention_costs(work, H200, None)[KernelKind.ATTENTION_BACKWARD].seconds

    ratios = [seconds(4, length) / seconds(8, length) for length in (8192, 65_536)]
    assert ratios[0] > 1.2 > 1.1 > ratios[1] > 1  # 256 programs, the first of a head 64 times the last one


@pytest.mark.parametrize("attention", ["triton", repeat("hopper")])
def test_values_narrower_than_keys_take_the_time_of_their_columns(workload, attention):
    latent = LatentConfig(query_rank=None, rank=512, nope_dim=128, rope_dim=64, value_dim=128)

    def seconds(head_dim, latent=None):
        mixers = () if latent is None else (latent,) * workload.config.num_hidden_layers
        config = replace(workload.config, head_dim=head_dim, mixers=mixers)
        work = replace(workload, config=config, document_lengths=(4096,), attention=attention)
        costs = attention_costs(work, H200, None)
        return np.array([costs[kind].seconds for kind in (KernelKind.ATTENTION_FORWARD, KernelKind.ATTENTION_BACKWARD)])

    ratio = seconds(192, latent) / seconds(128)
    np.testing.assert_allclose(ratio, [320 / 256, 832 / 640], rtol=0.06)
