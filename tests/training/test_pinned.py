"""Host memory that a run may pin, and JAX's pool of it."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxglue.engine.policy import parse_policies, parse_policy
from jaxglue.engine.residency import is_streamed, parse_weights
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.gpus import GIB, Dispatch, find_gpu
from jaxglue.planner.host_memory import HOST_LIMIT, available_memory
from jaxglue.planner.plan import MARGIN
from jaxglue.planner.planner import Planner
from jaxglue.planner.workload import Workload
from jaxglue.sharding.mesh import MeshShape
from jaxglue.training import memory, remat
from jaxglue.training.remat import Asked, RematChoice

V2 = {"memory.max": "{}", "memory.current": "{}", "memory.stat": "anon 7\nactive_file {}\ninactive_file 0"}
V1 = {
    "memory/memory.limit_in_bytes": "{}",
    "memory/memory.usage_in_bytes": "{}",
    "memory/memory.stat": "cache 7\nactive_file {}\ninactive_file 0",
}


@pytest.mark.parametrize("files", [V2, V1])
@pytest.mark.parametrize(("values", "free"), [((90, 30, 10), 70), ((900, 30, 10), 200), (("max", 30, 10), 200)])
def test_free_memory_is_within_the_containers_limit(tmp_path, monkeypatch, files, values, free):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=200))
    (tmp_path / "memory").mkdir()
    for (name, text), value in zip(files.items(), values, strict=True):
        (tmp_path / name).write_text(text.format(value))
    assert available_memory(tmp_path) == free
    assert available_memory(tmp_path / "absent") == 200


@pytest.fixture
def workload(tiny_config):
    config = config_from_hf({**tiny_config, "model_type": "qwen3"})
    return Workload(config=config, batch_size=1, seq_len=128, lora=LoraConfig())


def choice(weights, policy="full"):
    policies, places = parse_policies(policy, 3), parse_weights(weights, 3)
    return RematChoice(policies=policies, weights=places, remat=policy, host_bytes=3 * GIB)


@pytest.fixture
def renewed(monkeypatch):
    """Pretend to be on a GPU without arrays; list the renewals."""
    calls: list[bool] = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "live_arrays", list)
    monkeypatch.setattr(memory, "_renew_client", lambda: calls.append(True))
    return calls


def test_pool_has_the_size_of_streamed_weights(workload, renewed):
    environ = {HOST_LIMIT: "90"}
    assert memory.size_pool(workload, choice("host"), environ) == 5
    assert renewed == [True] and environ == {HOST_LIMIT: "5"}


@pytest.mark.parametrize("case", ["resident", "mapped", "processes", "preallocated", "arrays"])
def test_pool_is_left_to_grow(workload, renewed, monkeypatch, case):
    environ = {memory.PREALLOCATE: "false"} if case == "preallocated" else {}
    weights = {"resident": "device", "mapped": "mapped"}.get(case, "host")
    if case == "processes":
        monkeypatch.setattr(jax, "process_count", lambda: 2)
    if case == "arrays":
        monkeypatch.setattr(jax, "live_arrays", lambda: [0])
    assert memory.size_pool(workload, choice(weights), environ) == 0 and not renewed and HOST_LIMIT not in environ


def test_values_have_buffers_unless_the_hosts_memory_was_taken(workload, renewed, monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(memory, "HostBuffers", lambda device, size: made.append(size) or nullcontext())
    offloading = replace(choice("device", "offload"), offloaded_bytes=3 * GIB)
    for free in (4 * GIB, 2 * GIB):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        short = pytest.raises(ValueError, match=r"3\.0 GiB .* of which 2\.0 GiB are free")
        with short if free < 3 * GIB else nullcontext():
            memory.open_buffers(workload, offloading)
    memory.open_buffers(workload, choice("device"))
    assert made == [3 * GIB] and not renewed


def test_gpus_of_a_process_share_its_memory(workload, renewed, monkeypatch):
    object.__setattr__(workload, "mesh", MeshShape.parse("data=2"))
    monkeypatch.setattr(memory, "available_memory", lambda: 5 * GIB)
    with pytest.raises(ValueError, match=r"offloads 6\.0 GiB to host memory, of which 5\.0 GiB are free"):
        memory.open_buffers(workload, replace(choice("device", "offload"), offloaded_bytes=3 * GIB))
    assert memory.size_pool(workload, choice("host"), {}) == 8  # twice the plan's 3 GiB, and slack
    monkeypatch.setattr(remat, "host_memory", lambda: 4 * GIB)
    assert remat._pinned_for(workload, find_gpu("H100")) == 2 * GIB


RENEWAL = """
import os, sys, jax, jax.numpy as jnp
from jaxglue.training.memory import _renew_client
double = jax.jit(lambda x: 2 * x)
double(jnp.ones(8)).block_until_ready()
os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = "1"
_renew_client()
device = jax.local_devices()[0]
print(float(double(jnp.ones(8))[0]))
block = jax.jit(lambda: jnp.ones(2**26))()
host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
kept = []
try:
    for _ in range(8):
        kept.append(jax.block_until_ready(jax.device_put(block, host)))
except jax.errors.JaxRuntimeError:
    pass
print(len(kept))
"""


@pytest.mark.gpu
def test_renewed_client_has_another_limit():
    """Pin blocks of 256 MiB until a limit of 1 GiB, set after the first client began."""
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", RENEWAL], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "2.0" and 2 <= int(done.stdout.split()[1]) <= 4


@pytest.mark.parametrize("roomy", [True, False])
def test_embeddings_leave_the_gpu_where_memory_is_short(make_config, tiny_config, workload, monkeypatch, roomy):
    raw = {**tiny_config, "model_type": "qwen3", "hidden_size": 1024, "vocab_size": 200_000}
    on_gpu = replace(workload, config=config_from_hf({**raw, "tie_word_embeddings": False}))
    planners = [Planner(replace(on_gpu, host_embeddings=moved), find_gpu("H100")) for moved in (False, True)]
    most, least = (planner.plan(parse_policy("full")).device_bytes for planner in planners)
    gpu = replace(find_gpu("H100"), memory=(2 * most if roomy else (most + least) / 2) / (1 - MARGIN))
    monkeypatch.setattr(remat, "device_gpu", lambda *_: gpu)
    config = make_config(embeddings="auto", weights="auto", remat="full")
    planner, plan = remat._fastest(Asked.of(config), on_gpu)
    assert planner.workload.host_embeddings != roomy and not is_streamed(plan.weights)


@pytest.mark.parametrize(
    ("policy", "layer", "measured"),
    [("full", 8192, False), ("full", 64, True), ("auto", 8192, True), ("offload", 8192, True)],
)
def test_the_host_is_measured_where_times_depend_on_it(
    make_config, tiny_config, workload, monkeypatch, policy, layer, measured
):
    raw = {**tiny_config, "model_type": "qwen3", "hidden_size": layer, "intermediate_size": 2 * layer}
    work = replace(workload, config=config_from_hf(raw), seq_len=8192)
    asked: list[Dispatch | None] = []

    def device_gpu(_, dispatch=None):
        asked.append(dispatch)
        return find_gpu("H200")

    monkeypatch.setattr(remat, "device_gpu", device_gpu)
    remat._fastest(Asked.of(make_config(remat=policy)), work)
    assert (asked[-1] is None) == measured
