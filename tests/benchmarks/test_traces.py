"""Overlap of copies with kernels, from their times; and, on a GPU, from a real trace."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import split_model


def test_overlap_counts_only_copies_under_kernels():
    from traces import overlap

    found = overlap(to_host=[(0, 4)], to_device=[(3, 5), (8, 10)], kernels=[(1, 2), (2, 6), (1.5, 3), (9, 12)])
    assert found == (4, 4, 3 + 2 + 1, 5 + 3, 11)
    assert found.hidden_share == 6 / 8
    assert overlap([], [], [(0, 1)]).hidden_share == 1


def test_a_collective_is_exposed_where_no_kernel_runs():
    from traces import exposure

    events = [("gemm", (0, 4)), ("ncclDevKernel_AllGather", (3, 7)), ("fusion", (6, 9)), ("MemcpyD2D", (4, 6))]
    assert exposure(events) == (4, 2, 9)
    assert exposure([("gemm", (0, 4))]) == (0, 0, 4)


def test_exposed_collectives_are_the_mean_of_the_gpus_in_a_trace(tmp_path):
    from traces import collective_overlap

    first = [("gemm", 0, 4), ("ncclDevKernel_AllGather_RING_LL", 3, 7), ("MemcpyP2P", 8, 9)]
    second = [("gemm", 0, 6), ("all_reduce_kernel", 2, 3), ("MemcpyD2D", 6, 7)]
    write_trace(tmp_path / "host.xplane.pb", [("/host:CPU", "python", first), *gpu_planes(first, second)])
    assert collective_overlap(tmp_path) == pytest.approx(((5 + 1) / 2, (4 + 0) / 2, (8 + 6) / 2))


def gpu_planes(*gpus):
    return [(f"/device:GPU:{number}", "Stream #20(Compute)", events) for number, events in enumerate(gpus)]


def write_trace(path, planes):
    """Write a profiler's file of planes with one line each, of events' names, starts and ends (ms)."""
    text = ""
    for name, line, events in planes:
        names = "".join(
            f'event_metadata {{ key: {key} value {{ id: {key} name: "{event[0]}" }} }}'
            for key, event in enumerate(events)
        )
        times = "".join(
            f"events {{ metadata_id: {key} offset_ps: {start * 10**9} duration_ps: {(end - start) * 10**9} }}"
            for key, (_, start, end) in enumerate(events)
        )
        text += f'planes {{ name: "{name}" lines {{ name: "{line}" timestamp_ns: 1000 {times} }} {names} }}'
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))


def test_a_folder_without_a_trace_is_refused(tmp_path):
    from traces import copy_overlap

    with pytest.raises(ValueError, match="no profiler trace"):
        copy_overlap(tmp_path)


@pytest.mark.gpu
def test_copies_run_under_computation(tiny_config, random_batch, tmp_path):
    from traces import copy_overlap

    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 6, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = config_from_hf({**tiny_config, **sizes, **heads, "model_type": "qwen3"})
    model = build_model(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    add_lora(model, LoraConfig(), rngs=nnx.Rngs(1))
    graphdefs, trainable, frozen = split_model(model, nnx.LoRAParam)
    executor = Executor(graphdefs, config, policy=parse_policy("offload"))
    batch = jax.device_put(random_batch([[512] * 32], 16384))
    for _ in range(2):
        jax.block_until_ready(executor.loss_and_gradients(trainable, frozen, [batch], 1.0))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(executor.loss_and_gradients(trainable, frozen, [batch], 1.0))
    found = copy_overlap(tmp_path)
    assert found.to_host > 0 and found.to_device > 0
    assert found.hidden_share > 0.8
