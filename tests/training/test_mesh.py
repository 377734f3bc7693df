"""Whole runs on a mesh of four devices; see tests/sharding/test_simulated_devices.py."""

import json
import signal
from functools import partial

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from selection import repeat, repeats_parts_of

from jaxglue.generation.engine import Engine
from jaxglue.ops.adam import ADAM
from jaxglue.ops.backend import tracing_for
from jaxglue.sharding.mesh import MeshShape, make_mesh
from jaxglue.sharding.rules import SINGLE_DEVICE, Layout
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig
from jaxglue.training.record import read_metrics
from jaxglue.training.setup import resolve
from jaxglue.training.step import StepProgram, train_step
from jaxglue.training.train import train

pytestmark = pytest.mark.skipif(
    jax.device_count() != 4, reason="run by test_simulated_devices.py in a process of four devices"
)


def losses(folder):
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_full_fine_tuning_resumes_on_another_mesh(make_config, tmp_path, monkeypatch, caplog):
    options = {
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "seq_len": 48,
        "steps": 4,
        "method": "full",
        "learning_rate": 1e-3,
    }
    train(make_config(**options, output=tmp_path / "whole", mesh="data=2,fsdp=2"))
    assert "compiled programs again" not in caplog.text
    states = []

    def interrupted(*arguments):
        state, result = train_step(*arguments)
        states.append(state)
        if len(states) == 2:
            signal.raise_signal(signal.SIGTERM)
        return state, result

    monkeypatch.setattr("jaxglue.training.loop.train_step", interrupted)
    assert train(make_config(**options)) is None  # auto: fsdp=4
    embedding = states[-1].trainable["embed_tokens"]["weight"]
    moments = [state for state in jax.tree.leaves(states[-1].optimizer) if state.shape == embedding.shape]
    assert {array.sharding.spec for array in (embedding, *moments)} == {jax.sharding.PartitionSpec("fsdp")}
    assert train(make_config(**options, mesh="data=2,fsdp=2", resume=True)) is not None
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-4)
    assert states[-1].trainable["embed_tokens"]["weight"].sharding.spec == jax.sharding.PartitionSpec("fsdp")


@repeats_parts_of("test_full_fine_tuning_resumes_on_another_mesh")
def test_adapters_train_alike_on_data_and_fsdp(make_config, tmp_path, capsys):
    options = {"batch_size": 8, "steps": 3, "seq_len": 48, "rank": 2, "eval_fraction": 0.2}
    train(make_config(**options, output=tmp_path / "copies", sample_prompt=("Hello",), sample_tokens=2))
    assert "data=4" in capsys.readouterr().out
    train(make_config(**options, mesh="fsdp=4", sample_prompt=("Hello",), sample_tokens=2))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "copies"), rtol=1e-5)
    samples = [(tmp_path / run / "samples.jsonl").read_text() for run in ("run", "copies")]
    assert samples[0] == samples[1]


@repeats_parts_of("test_layers_share_programs_on_a_mesh")
@pytest.mark.parametrize("mesh", ["data=4", "fsdp=4"])
def test_a_step_on_a_mesh_is_one_program(make_config, tmp_path, caplog, mesh):
    options = {"batch_size": 8, "steps": 3, "seq_len": 48, "rank": 2, "dropout": 0.2, "mesh": mesh}
    train(make_config(**options, output=tmp_path / "several"))
    whole, calls = StepProgram.__call__, []
    with caplog.at_level("WARNING"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProgram, "__call__", lambda self, *args: calls.append(1) or whole(self, *args))
        train(make_config(**options, output=tmp_path / "one", layers_per_program=2))
    assert len(calls) == 3 and not caplog.records  # of programs compiled again
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "several"), rtol=1e-5)


@pytest.mark.parametrize("moments", ["float32", repeat("8bit")])
def test_kernels_update_each_devices_own_parameters(interpreted, monkeypatch, moments):
    from jaxglue.ops.adam import triton as adam_triton

    kernels = interpreted(adam_triton.TritonAdam)
    monkeypatch.setattr(adam_triton, "_TILE", 1024)
    monkeypatch.setattr(adam_triton, "TritonAdam", kernels)

    def tree(seed):
        split, whole = jax.random.normal(jax.random.key(seed), (2, 64, 128))
        return {"norm": {}, "layers": [{"mlp": {"up_proj": {"weight": split, "lora_A": whole}}}]}

    def two_steps(layout):
        config = OptimizerConfig(moments=moments, weight_decay=0.1, learning_rate=0.01)
        optimizer, trainable = AdamWOptimizer(config, 9, layout), layout.put(tree(0))
        state = optimizer.init(trainable)
        for step in range(2):
            trainable, state, values = optimizer.update(trainable, state, layout.put(tree(step + 1)), step)
        return trainable, values

    layout, launch, launched = Layout(make_mesh(MeshShape(data=2, fsdp=2))), kernels._launch, []
    monkeypatch.setattr(kernels, "_launch", lambda *args, **kw: launched.append(args[1]) or launch(*args, **kw))
    with tracing_for((9, 0)):
        trainable, values = two_steps(layout)
    assert launched and trainable["layers"][0]["mlp"]["up_proj"]["weight"].sharding.spec == PartitionSpec("fsdp")
    with ADAM.using(None):
        chex.assert_trees_all_close((trainable, values), two_steps(SINGLE_DEVICE), rtol=1e-4, atol=1e-5)


@repeats_parts_of("test_mesh_equals_one_device")
def test_expert_parallel_training_equals_data_parallel(make_config, moe_folder, tmp_path):
    options = {"batch_size": 8, "steps": 2, "seq_len": 48, "rank": 2, "router_balance_loss": 0.1, "eval_fraction": 0.2}
    for name, mesh in (("whole", "data=4"), ("run", "data=2,expert=2")):
        train(make_config(**options, output=tmp_path / name, mesh=mesh))
    whole, run = ([*read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "run"))
    figures = {"step", "loss", "eval_loss", "grad_norm", "expert_load_max", "expert_load_entropy"}
    for expected, got in zip(whole, run, strict=True):
        assert {name: got[name] for name in figures & got.keys()} == pytest.approx(
            {name: expected[name] for name in figures & expected.keys()}, rel=1e-4
        )
    assert any("expert_load_max" in line for line in run)


@repeats_parts_of("test_full_fine_tuning_resumes_on_another_mesh")
def test_rows_split_over_devices_resume_to_the_bit(make_config, tmp_path, monkeypatch, capsys):
    options = {"batch_size": 2, "steps": 3, "seq_len": 64, "rank": 2, "eval_fraction": 0.2}
    train(make_config(**options, output=tmp_path / "whole"))
    assert "data=2,context=2" in capsys.readouterr().out  # auto: there are fewer rows than devices

    def interrupted(*arguments):
        state, result = train_step(*arguments)
        if result.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return state, result

    with monkeypatch.context() as patch:
        patch.setattr("jaxglue.training.loop.train_step", interrupted)
        assert train(make_config(**options)) is None
    assert train(make_config(**options, resume=True)) is not None
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@repeats_parts_of("test_pairs_in_split_rows_equal_those_in_whole_rows")
def test_pairs_train_alike_in_whole_and_split_rows(make_config, write_jsonl, tmp_path):
    turn = [{"role": "user", "content": "What is 1 plus 1?"}]
    answers = ("It is 2.", "It is 3, I think, but who knows?")
    pair = {"prompt": turn} | {
        name: [{"role": "assistant", "content": text}]
        for name, text in zip(("chosen", "rejected"), answers, strict=True)
    }
    data = (write_jsonl([pair] * 24, "pairs.jsonl"),)
    options = {"objective": "dpo", "data": data, "batch_size": 8, "steps": 3, "seq_len": 96, "rank": 2}
    train(make_config(**options, output=tmp_path / "whole", mesh="data=4", reference_cache="off"))
    train(make_config(**options, mesh="data=2,context=2", reference_cache="on"))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-5)


@repeats_parts_of("test_answers_in_split_rows_equal_those_in_whole_rows")
def test_answers_are_learned_alike_in_whole_and_split_rows(make_config, write_jsonl, tmp_path):
    rows = [{"prompt": f"{a} plus {b}", "answer": str(a + b)} for a in range(4) for b in range(2)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 64, "objective": "grpo", "steps": 2}
    settings |= {"reward": ("length?soft=2&hard=8",), "num_generations": 2, "generation_batch_size": 16, "beta": 0.1}
    settings |= {"max_completion_length": 8, "learning_rate": 1e-3, "temperature": 0.7, "num_iterations": 2}
    train(make_config(**settings, batch_size=8, output=tmp_path / "whole", mesh="data=4"))
    train(make_config(**settings, batch_size=4, output=tmp_path / "split", mesh="data=2,context=2"))
    texts = [(tmp_path / name / "rollouts.jsonl").read_text().splitlines() for name in ("whole", "split")]
    assert texts[0] == texts[1]
    np.testing.assert_allclose(losses(tmp_path / "split"), losses(tmp_path / "whole"), rtol=1e-4, atol=1e-6)


def test_a_teacher_beside_several_devices_is_refused_with_the_remedy(make_config, write_jsonl):
    data = (write_jsonl([{"prompt": "a"}], "prompts.jsonl"),)
    settings = {"data": data, "objective": "distill", "teacher": "base", "batch_size": 4, "max_completion_length": 8}
    with pytest.raises(ValueError, match="is for one GPU yet, and there are 4: choose one with CUDA_VISIBLE_DEVICES"):
        resolve(make_config(**settings))


def test_devices_with_the_same_weights_share_the_prompts(make_config, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)  # each has programs of its own
    rows = [{"prompt": f"{a} plus {b}", "answer": str(a + b)} for a in range(4) for b in range(2)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 64, "objective": "grpo", "steps": 2}
    settings |= {"reward": ("length?soft=2&hard=8",), "num_generations": 2, "generation_batch_size": 16}
    settings |= {"max_completion_length": 8, "learning_rate": 1e-2, "temperature": 0.7, "batch_size": 8}
    shares, generate = [], Engine.generate

    def noted(self, trainable, frozen, requests, *args, **options):
        devices = {device for leaf in jax.tree.leaves(trainable) for device in leaf.devices()}
        shares.append((frozenset(devices), len(requests)))
        with jax.transfer_guard_device_to_device("disallow"):  # pages made on another device leave holes in its memory
            yield from generate(self, trainable, frozen, requests, *args, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    train(make_config(**settings, output=tmp_path / "split", mesh="fsdp=2"))
    assert [(len(devices), count) for devices, count in shares] == [(2, 8), (2, 8)]  # both work on all prompts
    shares.clear()
    train(make_config(**settings, output=tmp_path / "copied", mesh="data=2"))
    assert len(shares) == 4 and len(set(shares)) == 2  # in each of two steps, each device answers two prompts
    assert {(len(devices), count) for devices, count in shares} == {(1, 4)}
    texts = [(tmp_path / name / "rollouts.jsonl").read_text().splitlines() for name in ("split", "copied")]
    answers = [[json.loads(line)["answer"] for line in lines] for lines in texts]
    assert answers[0] == answers[1]


@pytest.fixture
def make_exact(make_config, write_jsonl):
    """Build a run on answers that are sampled with the bits of training."""
    rows = [{"prompt": f"{a} plus {b}", "answer": str(a + b)} for a in range(4) for b in range(2)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 256, "objective": "grpo", "steps": 2}
    settings |= {"reward": ("length?soft=2&hard=8",), "num_generations": 2, "generation_batch_size": 16}
    settings |= {"max_completion_length": 8, "learning_rate": 1e-2, "dtype": "bfloat16", "exact_sampling": "on"}
    return partial(make_config, **settings, batch_size=4)


@pytest.mark.parametrize("mesh", ["fsdp=4", "data=2,context=2"])
def test_divided_weights_or_rows_are_not_sampled_with_the_bits_of_training(make_exact, mesh):
    with pytest.raises(ValueError, match=f"on cannot be kept: weights or rows are divided among GPUs by .* {mesh}"):
        resolve(make_exact(mesh=mesh))


@repeats_parts_of("test_devices_with_the_same_weights_share_the_prompts")
def test_devices_that_share_the_prompts_sample_with_the_bits_of_training(make_exact):
    summary = train(make_exact(mesh="data=4"))  # which compares them in its first step
    values = read_metrics(summary.metrics)
    assert [step["sampling/sampling_logp_difference/mean"] for step in values] == [0.0, 0.0]
    assert values[0]["grad_norm"] > 0


@repeats_parts_of("test_devices_with_the_same_weights_share_the_prompts")
def test_one_of_two_devices_samples_while_the_other_trains(make_config, tmp_path, write_jsonl, monkeypatch):
    """Answers and weights are those of one device by turns."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    rows = [{"question": f"What is {n} plus 1?"} for n in range(4)]
    settings = {"data": (write_jsonl(rows, "prompts.jsonl"),), "seq_len": 64, "objective": "grpo", "steps": 3}
    settings |= {"num_generations": 4, "generation_batch_size": 8, "max_completion_length": 8, "staleness": 1}
    settings |= {"reward": ("length?soft=2&hard=8",), "learning_rate": 3e-2}
    devices, sampled, local = jax.local_devices(), set(), jax.local_devices
    generate = Engine.generate

    def noted(self, trainable, frozen, *arguments, **options):
        for tree in (trainable, frozen):
            sampled.update(*(leaf.devices() for leaf in jax.tree.leaves(tree)))
        return generate(self, trainable, frozen, *arguments, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    train(make_config(**settings, output=tmp_path / "two"))
    assert sampled == {devices[1]}
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_devices", lambda *arguments, **options: local(*arguments, **options)[:1])
    sampled.clear()
    train(make_config(**settings, output=tmp_path / "one"))
    assert sampled == {devices[0]}
    for file in ("rollouts.jsonl", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


def test_several_devices_that_train_have_none_to_sample_ahead(make_config, write_jsonl):
    settings = {
        "data": (write_jsonl([{"question": "1 + 1?"}], "prompts.jsonl"),),
        "objective": "grpo",
        "max_completion_length": 8,
    }
    with pytest.raises(ValueError, match="--staleness is for one GPU, or two of which one samples, and --mesh data=4"):
        resolve(make_config(**settings, staleness=1, reward=("length?soft=2&hard=8",), batch_size=4))
