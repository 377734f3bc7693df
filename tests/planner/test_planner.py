"""Predictions of the planner, its choices, and its errors."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from selection import repeats_parts_of

from jaxglue.engine.policy import parse_policies, parse_policy
from jaxglue.models import config_from_hf
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.ops.backend import tracing_for
from jaxglue.planner import rates
from jaxglue.planner.candidates import policies_and_mixes
from jaxglue.planner.equation_sizes import received_bytes
from jaxglue.planner.gpus import GIB, RECORDED, find_gpu
from jaxglue.planner.host_memory import HOST_LIMIT, pinned_memory, raise_pinned_limit
from jaxglue.planner.plan import MARGIN, DoesNotFit
from jaxglue.planner.planner import Planner, plan
from jaxglue.planner.programs import abstract_input, can_scale, layer_programs
from jaxglue.planner.rates import device_gpu, measure_gpu
from jaxglue.planner.workload import Workload, abstract_parts
from jaxglue.sharding.mesh import MeshShape

HOST = 64 * GIB
TOKENS = 1280
"""Tokens of a row whose layer inputs exceed `SMALL_VALUES`."""


@pytest.fixture(scope="module")
def workload(tiny_config):
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6, "vocab_size": 32000}
    config = config_from_hf({**tiny_config, **sizes, "model_type": "qwen3", "head_dim": 128})
    return Workload(config=config, batch_size=1, seq_len=TOKENS, lora=LoraConfig(), document_lengths=(TOKENS - 1,))


@pytest.fixture(scope="module")
def planner(workload):
    return Planner(workload, find_gpu("RTX 4090"))


def _with_memory(planner: Planner, gib: float) -> Planner:
    return Planner(planner.workload, replace(planner.gpu, memory=gib * GIB))


def test_saving_more_takes_memory_and_saves_time(planner):
    offload, full, dots = (planner.plan(parse_policy(name)) for name in ("offload", "full", "dots"))
    assert offload.device_bytes < full.device_bytes < dots.device_bytes
    assert dots.seconds < full.seconds < offload.seconds
    assert offload.host_bytes == 4 * TOKENS * 2048 * 2  # all layer inputs but the last two
    assert full.host_bytes == dots.host_bytes == 0


def test_rows_of_embeddings_run_twice(workload, monkeypatch):
    work = replace(workload, objective=ObjectiveConfig(objective="embed").make(), gradient_accumulation_steps=2)
    twice = plan(work, "H100", remat="dots").seconds
    monkeypatch.setattr(type(work.objective), "two_passes", False)
    once = plan(work, "H100", remat="dots").seconds
    assert 1.2 < twice / once < 1.5  # a forward pass beside forward and gradients


def test_nothing_leaves_a_gpu_whose_memory_is_the_hosts(workload):
    full = Planner(workload, find_gpu("spark")).plan(parse_policy("full")).device_bytes / GIB
    assert plan(workload, "gb200", memory_limit=1.15 * full).host_bytes > 0
    assert plan(workload, "spark", memory_limit=1.15 * full).host_bytes == 0
    assert plan(workload, "gb200", memory_limit=1.05 * full).host_bytes > 0
    with pytest.raises(DoesNotFit, match=r"of pinned host memory, which is the memory of GB10 itself"):
        plan(workload, "spark", memory_limit=1.05 * full)


def test_streamed_weights_leave_the_device(planner):
    here, there = (planner.plan(parse_policy("offload"), weights=where) for where in ("device", "host"))
    input_ = TOKENS * 2048 * 2
    layer = 4 * 2048 * (2 * 512 + 2 * 256) // 4 * 2 + 3 * 2048 * 6144 * 2
    # The first layer stays on the device; the four buffers hold activations of one layer more.
    assert there.host_bytes - here.host_bytes == pytest.approx(5 * layer - input_, rel=0.01)
    unfilled = 0.05 / 1.05 * there.device_bytes  # of blocks, beyond the spare memory
    assert here.device_bytes - there.device_bytes == pytest.approx(layer - input_ - unfilled, rel=0.01)


@repeats_parts_of("test_longest_row_fits_and_the_next_one_does_not")
def test_a_row_on_two_gpus_takes_half_the_memory_and_almost_half_the_time(workload):
    seq_len, full, gpu = 64 * 1024, parse_policy("full"), find_gpu("H100")
    long = replace(workload, seq_len=seq_len, document_lengths=(seq_len,))
    whole, half = (Planner(replace(long, mesh=MeshShape(context=parts)), gpu).plan(full) for parts in (1, 2))
    assert 0.5 < half.seconds / whole.seconds < 0.53
    inputs = workload.config.num_hidden_layers * seq_len * workload.config.hidden_size * 2
    assert half.device_bytes < whole.device_bytes - inputs / 2
    split = Planner(replace(workload, mesh=MeshShape(context=2)), find_gpu("RTX 4090").limited(3))
    whole = Planner(workload, split.gpu)
    assert whole.longest_row(host_memory=0) < 0.6 * split.longest_row(host_memory=0)


def test_time_grows_with_tokens_and_shrinks_with_the_gpu(planner, workload):
    full = parse_policy("full")
    longer = Planner(replace(workload, seq_len=2 * TOKENS), planner.gpu).plan(full)
    faster = Planner(workload, find_gpu("NVIDIA H200")).plan(full)
    assert longer.seconds > 1.8 * planner.plan(full).seconds > 1.8 * faster.seconds


@pytest.mark.parametrize(("remat", "measured"), [("full", 1.1588), ("dots", 0.8743)])
def test_times_are_near_recorded_ones(remat, measured):
    """Steps of Qwen3-8B, of whose time matmuls take most, on an H200 (`benchmarks/results/planner.json`)."""
    raw = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    work = Workload(
        config=config_from_hf(raw | {"tie_word_embeddings": False}),
        batch_size=1,
        seq_len=16384,
        lora=LoraConfig(),
        document_lengths=(512,) * 32,
        batches_known=True,
    )
    found = Planner(work, find_gpu("H200")).plan(parse_policies(remat, 36), weights="device", layers_per_program=1)
    assert found.seconds == pytest.approx(measured, rel=0.06)


def test_auto_gets_leaner_as_memory_shrinks(planner):
    none, dots, full = (planner.plan(parse_policy(text)).device_bytes / GIB for text in ("none", "dots", "full"))
    roomy = _with_memory(planner, none / (1 - MARGIN) + 0.01).choose(host_memory=HOST)
    middling = _with_memory(planner, (dots + full) / 2 / (1 - MARGIN)).choose(host_memory=HOST)
    assert roomy.remat == "none"
    assert middling.device_bytes < roomy.device_bytes and middling.remat != "full"
    assert roomy.seconds < middling.seconds < planner.plan(parse_policy("full")).seconds
    assert parse_policies(middling.remat, 6) == middling.policies


@pytest.mark.parametrize(("share", "kinds"), [(0.6, 2), (1.1, 1)])
def test_two_gpus_are_planned_as_one_but_for_the_exchange(workload, share, kinds):
    gpu, workload = find_gpu("H100"), replace(workload, seq_len=8192)
    small, large = (Planner(workload, gpu).plan(parse_policy(name)).device_bytes for name in ("dots", "none"))
    gpu = replace(gpu, memory=(small + share * (large - small)) / (1 - MARGIN))
    planners = [Planner(replace(workload, mesh=MeshShape(data=count)), gpu) for count in (1, 2)]
    alone, together = (planner.choose(host_memory=0) for planner in planners)
    assert together.policies == alone.policies and len(set(alone.policies)) == kinds
    assert (together.layers_per_program, together.device_bytes) == (alone.layers_per_program, alone.device_bytes)
    assert together.seconds - alone.seconds == pytest.approx(planners[1].predictor.resident.trainable / gpu.peers)


@pytest.mark.parametrize(
    ("share", "flags"),
    [(0.95, "--moments 8bit would fit"), (0.62, "--moments 8bit --update-in-backward --clip-norm 0 would fit")],
)
def test_lighter_optimizers_are_named_where_all_weights_train(workload, share, flags):
    full = Planner(replace(workload, lora=None), find_gpu("H100"))
    least = min(full.memory(parse_policy(name)).device_bytes for name in ("full", "offload"))
    with pytest.raises(DoesNotFit, match=flags):
        _with_memory(full, share * least / GIB / (1 - MARGIN)).choose(host_memory=HOST)


def test_does_not_fit_names_the_remedy(planner):
    offload = planner.plan(parse_policy("offload")).device_bytes
    small = _with_memory(planner, 1.05 * offload / (1 - MARGIN) / GIB)
    with pytest.raises(DoesNotFit, match=r"--remat 'dots' with 1 × 1,280 tokens needs .* GiB on the GPU.*would fit in"):
        small.check(small.plan(parse_policy("dots")), host_memory=HOST)
    least = min(plan.device_bytes for plan in planner.plans())
    smaller = _with_memory(planner, 0.98 * least / (1 - MARGIN) / GIB)
    with pytest.raises(DoesNotFit, match=r"--seq-len \d+ would fit"):
        smaller.choose(host_memory=HOST, weights="auto")
    with pytest.raises(DoesNotFit, match="no setting fits"):
        _with_memory(planner, 0.01).choose(host_memory=HOST, weights="auto")


def test_what_fits_the_gpu_is_not_offloaded(planner):
    offload, full = (planner.plan(parse_policy(text)) for text in ("offload", "full"))
    assert planner.candidates.keep_on_device(offload, host_memory=0).policies == full.policies
    middle = _with_memory(planner, (offload.device_bytes + full.device_bytes) / 2 / (1 - MARGIN) / GIB)
    kept = middle.candidates.keep_on_device(offload, host_memory=0)
    assert 0 < kept.host_bytes < offload.host_bytes
    assert middle.fits(kept, offload.host_bytes)
    lean = _with_memory(planner, offload.device_bytes / (1 - MARGIN) / GIB)
    assert lean.candidates.keep_on_device(offload, host_memory=HOST) == offload


def test_small_values_stay_on_the_gpu(planner):
    short = planner.with_seq_len(1024)  # whose layers' inputs take 4 MiB
    offload, full = (short.resolve(name, weights="device", host_memory=0) for name in ("offload", "full"))
    assert offload == full
    assert short.plan(parse_policy("offload:layer_input,gate")).host_bytes > 0
    assert short.plan(parse_policy("offload"), weights="host").remat == "offload"
    assert len(set(short.plans())) == len(short.plans())


def test_host_memory_is_checked(planner):
    with pytest.raises(DoesNotFit, match=r"of pinned host memory, of which 0.0 GiB may be used .*HOST_MEMORY_LIMIT_GB"):
        planner.check(planner.plan(parse_policy("offload")), host_memory=1000)


def test_recomputation_is_counted(planner):
    """`full` recomputes the forward pass's matmuls but the last one, which the backward pass does not need."""
    from jaxglue.engine.layer import LayerFunctions
    from jaxglue.ops.equations import equations
    from jaxglue.planner.equation_sizes import dot_flops

    graphdefs, trainable, frozen = abstract_parts(planner.workload)

    def flops(policy):
        layer = LayerFunctions(graphdefs.layers[0], parse_policy(policy))
        trees = trainable["layers"][0], frozen["layers"][0]
        x, context = abstract_input(planner.workload)
        y, residuals, _ = layer.forward.eval_shape(*trees, x, context)
        program = layer.backward.trace(residuals, *trees, x, context, y, None).jaxpr.jaxpr
        return sum(n * dot_flops(eqn) for eqn, n in equations(program) if eqn.primitive.name == "dot_general")

    weights = TOKENS * 2 * (2048 * (2 * 512 + 2 * 256) + 3 * 2048 * 6144)
    assert flops("none") == pytest.approx(weights, rel=0.05)  # the gradient to the input; adapters are small
    recomputed = weights - TOKENS * 2 * 2048 * 6144
    assert flops("full") - flops("none") == pytest.approx(recomputed, rel=0.05)


def test_rates_are_measured():
    gpu = measure_gpu(jax.devices()[0], size=64)
    assert gpu.name == jax.devices()[0].device_kind
    assert min(gpu.matmul, gpu.copy, gpu.link) > 0


@pytest.mark.parametrize(("measured", "link"), [(20e9, 20e9), (50e9, 55e9), (60e9, 55e9)])
def test_slow_links_are_planned_for(monkeypatch, measured, link):
    monkeypatch.setattr(rates, "host_link", lambda: measured)
    monkeypatch.setattr(rates, "host_dispatch", lambda: RECORDED)
    device = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 8})
    assert device_gpu(device) == replace(find_gpu("H200"), memory=8, link=link)
    assert device_gpu(device, RECORDED).link == 55e9


def test_devices_without_memory_statistics_are_refused():
    with pytest.raises(ValueError, match="name a remat policy, not auto"):
        device_gpu(jax.devices("cpu")[0])


def test_pinned_memory_is_limited_by_host_and_jax():
    assert pinned_memory(100 * GIB) == 64 * GIB
    assert pinned_memory(100 * GIB, "80") == 80 * GIB
    assert pinned_memory(10 * GIB, "80") == 9 * GIB


@pytest.mark.parametrize(
    ("free", "given", "limit"), [(200, {}, "180"), (60, {}, None), (200, {HOST_LIMIT: "70"}, "70")]
)
def test_pinned_limit_is_raised_where_memory_is_free(monkeypatch, free, given, limit):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free * GIB))
    raise_pinned_limit(given)
    assert given.get(HOST_LIMIT) == limit


def test_update_in_backward_holds_one_layers_gradients(workload):
    gpu, policy = find_gpu("H200"), parse_policy("full")
    at_end, in_backward = (
        Planner(replace(workload, lora=None, seq_len=256, update_in_backward=updates), gpu, layers_per_program=1)
        for updates in (False, True)
    )
    saved = at_end.plan(policy).device_bytes - in_backward.plan(policy).device_bytes
    layer = 4 * (2048 * (2 * 512 + 2 * 256) + 3 * 2048 * 6144)
    assert saved == pytest.approx(5 * layer, rel=0.3)  # and the embedding's


@pytest.mark.parametrize(("tied", "passes"), [(True, 2), (False, 0)])
def test_a_program_of_its_own_adds_the_tables_gradient_to_the_heads(workload, tied, passes):
    config = replace(workload.config, tie_word_embeddings=tied)
    planner = Planner(replace(workload, config=config, lora=None, seq_len=256), find_gpu("H200"))
    whole, alone = (planner.plan(parse_policy("none"), layers_per_program=count) for count in (6, 1))
    added = planner.predictor.work(alone).gpu_seconds - planner.predictor.work(whole).gpu_seconds
    assert added == pytest.approx(passes * 4 * 32000 * 2048 / planner.gpu.copy, rel=1e-6)


def test_resolve_reads_flags(planner):
    assert planner.resolve("2 x offload + 4 x dots", weights="device", host_memory=HOST).remat == (
        "2 x offload + 4 x dots"
    )
    assert planner.resolve("auto", weights="device", host_memory=HOST).remat == "none"
    with pytest.raises(ValueError, match="drops the first layer's input"):
        planner.resolve("drop:layer_input", weights="device", host_memory=HOST)


def test_experts_are_planned_without_a_gpu(tiny_config):
    experts = {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    config = config_from_hf({**tiny_config, **sizes, **experts})
    shapes = {"batch_size": 1, "lora": LoraConfig(), "document_lengths": (1023,)}
    short, long = (
        Planner(Workload(config=config, seq_len=seq_len, **shapes), find_gpu("H200")).plan(parse_policy("full"))
        for seq_len in (8192, 16384)
    )
    assert 1.5 * short.seconds < long.seconds < 2.2 * short.seconds


def test_weights_stay_in_files_where_host_memory_is_short(planner):
    workload = replace(planner.workload, config=planner.workload.config.with_layers([0] * 16))
    on_host = Planner(workload, planner.gpu).plan(parse_policy("full"), weights="host")
    gpu, short = planner.gpu.limited(1.05 * on_host.device_bytes / (1 - MARGIN) / GIB), on_host.host_bytes / 2
    with pytest.raises(DoesNotFit):
        Planner(workload, gpu).resolve("full", weights="auto", host_memory=short)
    slow, fast = (
        Planner(workload, replace(gpu, files=rate)).resolve("full", weights="auto", host_memory=short)
        for rate in (gpu.link / 50, gpu.link)
    )
    assert slow.weights == fast.weights and "mapped" in slow.weights and slow.mapped_bytes > 0
    assert slow.host_bytes <= short and slow.seconds > fast.seconds
    chosen = Planner(workload, replace(gpu, files=gpu.link)).choose(host_memory=short, weights="auto")
    assert chosen.host_bytes <= short and chosen.device_bytes <= gpu.memory


def test_memory_limit_moves_weights_to_the_host(planner):
    plans = (planner.plan(parse_policy("offload"), weights=where) for where in ("device", "host"))
    middle = sum(plan.device_bytes for plan in plans) / 2 / GIB
    limited = Planner(planner.workload, planner.gpu.limited(middle / (1 - MARGIN)))
    with pytest.raises(DoesNotFit, match=r"--remat '.*' --weights host would fit"):
        limited.resolve("none", weights="device", host_memory=HOST)
    for remat in ("offload", "auto"):
        plan = limited.resolve(remat, weights="auto", host_memory=HOST)
        assert "host" in plan.weights and plan.device_bytes / GIB < middle
    assert planner.gpu.limited(None) == planner.gpu
    assert planner.gpu.limited(1000).memory == planner.gpu.memory


@pytest.mark.parametrize(
    ("lora", "ranks"),
    [
        (LoraConfig(targets=("2.self_attn.q_proj",), rank=3), [0, 0, 3, 0, 0, 0]),
        (LoraConfig(targets=("q_proj",), rank=3, rank_pattern=(r"layers\.[14]\..*=5",)), [3, 5, 3, 3, 5, 3]),
        (LoraConfig(targets=("q_proj",), rank=3), [3] * 6),
    ],
)
def test_layers_are_planned_with_the_adapters_of_their_own(workload, lora, ranks):
    _, trainable, _ = abstract_parts(replace(workload, lora=lora))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(layer)] for layer in trainable["layers"]]
    assert [shape[0][0] if shape else 0 for shape in shapes] == ranks


def test_8bit_moments_take_less_memory(workload):
    planners = [Planner(replace(workload, moment_bytes=each), find_gpu("RTX 4090")) for each in (8, 2)]
    plans = [planner.plan(parse_policy("full")) for planner in planners]
    trained = sum(leaf.size for leaf in jax.tree.leaves(abstract_parts(workload)[1]))
    assert plans[0].device_bytes - plans[1].device_bytes == pytest.approx(6 * trained, abs=2)
    assert plans[1].seconds < plans[0].seconds


def test_expert_parallel_layers_hold_tokens_of_all_devices(tiny_config):
    pytest.importorskip("jax_triton", reason="the kernels of experts are traced")
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = config_from_hf({**tiny_config, **moe, "hidden_size": 512, "num_hidden_layers": 2})
    work = Workload(config=config, batch_size=1, seq_len=1024, lora=LoraConfig(), document_lengths=(1023,))
    graphdefs, *trees = abstract_parts(work)
    layer, keep = graphdefs.layers[0], parse_policy("save:expert_gate_up")
    with tracing_for((9, 0)):
        one, four = (layer_programs(layer, keep, work, [t["layers"][0] for t in trees], experts=n) for n in (1, 4))
    tokens, rows = 1024 * 512 * 2, 1024 * 2 * 2 * 256 * 2
    assert [sum(each.kept.values()) for each in (one, four)] == [rows, 4 * rows]
    assert received_bytes(one.backward.program.jaxpr) == 0
    passes = [received_bytes(each.program.jaxpr) / (3 * tokens) for each in (four.forward, four.backward)]
    assert passes == pytest.approx([2, 3], rel=0.05)  # the backward pass gathers the tokens again


def test_queries_computed_again_wait_beside_the_experts_values(tiny_config):
    pytest.importorskip("jax_triton", reason="the kernels of experts are traced")
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = config_from_hf({**tiny_config, **moe, "hidden_size": 512, "num_hidden_layers": 2})
    work = Workload(config=config, batch_size=1, seq_len=4096, lora=LoraConfig(), document_lengths=(4096,))
    planner, attention = Planner(work, find_gpu("H200")), "save:attention_out,attention_lse"
    again, kept = (planner.predictor.model.layer(0, parse_policy(attention + more)).backward for more in ("", ",query"))
    queries = 4096 * config.num_attention_heads * config.head_dim * 2
    assert again.temporary >= kept.temporary + queries


def test_reference_waits_for_streamed_weights_in_a_pass_of_its_own(workload):
    objective = ObjectiveConfig(objective="dpo").make()
    compared = replace(workload, seq_len=2048, objective=objective, reference=True)
    planner = Planner(compared, find_gpu("H100"))
    policies = [parse_policy("full")] * 6
    beside, alone = planner.predictor.reference_seconds(policies, ["device"] * 6)
    _, streamed = planner.predictor.reference_seconds(policies, ["device", *["host"] * 5])
    assert beside > 0 and streamed > 2 * alone > 0


def test_scaled_programs_take_what_traced_ones_take(planner):
    short, row, long = (planner.with_seq_len(length) for length in (512, 1024, 2048))
    scaled = planner.with_rows(1024, None, scaled=(short.predictor.programs, long.predictor.programs))
    for policy in map(parse_policy, ("full", "offload:layer_input,gate")):
        memory = scaled.memory(policy)
        assert memory.device_bytes == pytest.approx(row.memory(policy).device_bytes, rel=1e-3)
        assert memory.host_bytes == row.memory(policy).host_bytes


def test_plans_are_for_the_layers_in_a_program_asked_for(planner, workload):
    grouped = Planner(workload, planner.gpu, layers_per_program=3)
    plan = grouped.resolve("none", weights="auto", host_memory=HOST)
    assert plan == planner.plan(parse_policy("none"), layers_per_program=3)
    with pytest.raises(ValueError, match="--layers-per-program 3 is for GPUs that keep everything"):
        grouped.resolve("offload", weights="auto", host_memory=HOST)


def test_rows_with_equally_many_tiles_tell_nothing_of_others(workload):
    first, alike, other = (
        replace(workload, seq_len=n, tile=n // count) for n, count in ((8192, 4), (4096, 4), (6144, 2))
    )
    assert not can_scale(first, alike, other)
    assert can_scale(first, other, alike) and can_scale(first, alike, replace(workload, seq_len=2048, tile=512))


def test_longest_row_fits_and_the_next_one_does_not(planner):
    here, there = (each.plan(parse_policy("full")).device_bytes for each in (planner, planner.with_seq_len(2048)))
    small = _with_memory(planner, (here + there) / 2 / (1 - MARGIN) / GIB)
    longest = small.longest_row(host_memory=0)
    assert 1024 < longest < 2048
    assert small.with_seq_len(longest).choose(host_memory=0)
    with pytest.raises(DoesNotFit):
        small.with_seq_len(longest + 128).choose(host_memory=0)


def test_rows_that_fill_the_gpu_are_tiled(planner):
    longer = planner.with_seq_len(65536)
    whole = longer.plan(parse_policy("offload"), weights="host")
    assert whole.tile is None
    limited = _with_memory(longer, 0.7 * whole.device_bytes / GIB)
    plan = limited.choose(host_memory=HOST, weights="auto")
    assert plan.tile in (32768, 16384, 8192)
    assert 65536 % plan.tile == 0
    assert plan.device_bytes <= (1 - MARGIN) * limited.gpu.memory
    assert f"--tile {plan.tile}" in str(plan)


def test_reference_takes_a_forward_pass_more(workload):
    objective = ObjectiveConfig(objective="dpo").make()
    long = replace(workload, seq_len=8192)
    compared = replace(long, objective=objective, reference=True)
    policy = parse_policy("full")
    plans = {
        name: Planner(work, find_gpu("H100")).plan(policy)
        for name, work in {"sft": long, "dpo": compared, "cached": replace(compared, reference=False)}.items()
    }
    # Forward, forward again and backward to inputs are three passes; the reference is a fourth.
    assert 1.2 < plans["dpo"].seconds / plans["cached"].seconds < 1.4
    assert plans["cached"].seconds == pytest.approx(plans["sft"].seconds, rel=0.15)
    assert plans["dpo"].device_bytes >= plans["cached"].device_bytes


def test_normed_branches_are_kept_where_much_is():
    usual, _ = policies_and_mixes(keep_attention=False, tiled=False, adapters=True)
    policies, mixes = policies_and_mixes(keep_attention=False, tiled=False, adapters=True, normed_branch=True)
    assert set(usual) < set(policies) and all("mlp_branch" in policy for policy in set(policies) - set(usual))
    assert any("mlp_branch" in fast for _, fast in mixes)
