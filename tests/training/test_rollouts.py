"""Runs on answers that the model writes: what a step trains on, and runs that go on after they were stopped."""

import json
import shutil
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from selection import repeat, repeats_parts_of

from jaxglue.data.tokenizer import load_tokenizer
from jaxglue.engine import compiler
from jaxglue.generation.config import AssistantConfig
from jaxglue.generation.scoring import RewardScorer
from jaxglue.hf.adapter import TENSORS
from jaxglue.models.lora_config import LoraConfig
from jaxglue.planner.gpus import find_gpu
from jaxglue.planner.planner import plan
from jaxglue.rl import loop, sampler, teachers
from jaxglue.rl.journal import EpisodeFile
from jaxglue.rl.rewards import Judge
from jaxglue.rl.sampler import Sampler
from jaxglue.rl.teachers import ServedTeacher
from jaxglue.training import idle_moments, rollout_policy
from jaxglue.training import loop as training
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.fingerprint import check_fingerprint, fingerprint
from jaxglue.training.idle_moments import IdleMoments
from jaxglue.training.record import read_metrics
from jaxglue.training.rollout_policy import TrainedPolicy
from jaxglue.training.setup import resolve
from jaxglue.training.step import prepare_steps
from jaxglue.training.train import train

REWARDS = """
def even(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def named(prompts, completions, wanted, **columns):
    return [float(w in c[0]["content"]) for c, w in zip(completions, wanted)]
"""


@pytest.fixture
def make_run(tmp_path, make_config, write_jsonl):
    """Build a run of GRPO with two prompts of four answers a step."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    rows = [{"question": f"What is {a} plus {b}?", "wanted": str(a + b)} for a in range(3) for b in range(2)]
    data = write_jsonl(rows, "prompts.jsonl")

    def make(**changes):
        given = {
            "data": (data,),
            "seq_len": 128,
            "objective": "grpo",
            "reward": (f"{rewards}:even", f"{rewards}:named?weight=0.5"),
            "num_generations": 4,
            "generation_batch_size": 8,
            "max_completion_length": 12,
            "steps": 3,
        }
        return make_config(**given | changes)

    return make


def rollouts(config) -> list[dict]:
    return [json.loads(line) for line in (config.run.output / "rollouts.jsonl").read_text().splitlines()]


@repeats_parts_of("test_a_stopped_run_goes_on_to_the_bit")
def test_a_run_samples_rewards_and_trains(make_run, monkeypatch):
    config, made = make_run(temperature=0.5), set[str]()
    make = compiler.Program.__init__

    def noted(self, function, **options):
        make(self, function, **options)
        if compiler.rounds_as_written():
            made.add(function.__qualname__)

    monkeypatch.setattr(compiler.Program, "__init__", noted)
    summary = train(config)
    # Sampling and training round alike: both sides' layers, and the heads.
    assert {
        "CachedLayer._prefill",
        "CachedLayer._decode",
        "EnginePrograms._scan",
        "EnginePrograms._sample_next",
    } <= made
    assert {"LayerFunctions._forward", "EmbedHead._loss", "EmbedHead._log_probs"} <= made
    assert summary.steps == 3
    metrics, lines = read_metrics(summary.metrics), rollouts(config)
    assert [line["step"] for line in lines] == [step for step in (1, 2, 3) for _ in range(8)]
    for step, values in enumerate(metrics, 1):
        own = [line for line in lines if line["step"] == step]
        total = [line["rewards"]["even"] + 0.5 * line["rewards"]["named"] for line in own]
        assert values["reward"] == pytest.approx(np.mean(total))
        assert values["rewards/even/mean"] == pytest.approx(np.mean([line["rewards"]["even"] for line in own]))
        # Adapters have values from step 2 on: sampling and training know them, and the temperature, alike.
        assert values["sampling/sampling_logp_difference/mean"] < 1e-5
        assert values["completions/mean_length"] == pytest.approx(np.mean([line["tokens"] for line in own]))
    assert len({line["answer"] for line in lines}) > 20  # neither groups nor steps are copies
    assert len({line["origin"] for line in lines}) == 6
    page = (config.run.output / "run.html").read_text()
    (run,) = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert run["rollouts"][-1]["answer"] == lines[-1]["answer"] and run["summary"]["steps"] == 3
    assert dict(run["plan"]["rows"])["objective"].startswith("grpo")


@pytest.mark.parametrize("setting", [{"top_k": 1}, repeat({"top_p": 1e-6}), repeat({"min_p": 1.0})], ids=str)
def test_tokens_left_out_of_sampling_stay_in_log_probabilities(make_run, setting):
    config = make_run(steps=1, **setting)
    (values,), lines = read_metrics(train(config).metrics), rollouts(config)
    assert len({(line["origin"], line["answer"]) for line in lines}) == 2  # answers of the likeliest tokens alone
    assert values["sampling/sampling_logp_difference/mean"] < 1e-5
    assert values["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("continued", [False, repeat(True)])
def test_a_reference_stays_what_the_run_began_with(make_run, continued):
    """New adapters are left out, and add nothing at first; those of another run have a copy."""
    first = make_run(beta=0.1, learning_rate=3e-2, steps=1)
    if continued:
        train(first)
        base = {"model": str(first.run.output / "base"), "random_weights": False}
        first = make_run(
            beta=0.1, adapter=first.run.output / "adapter", output=first.run.output / "next", rank=16, **base
        )
    run = resolve(first)
    (first.run.output / "rollouts").mkdir(parents=True, exist_ok=True)
    parts, state = prepare_steps(run, None)
    policy = TrainedPolicy(run, parts, state)
    run.rollouts.begin(policy, run.tokenizer)
    batch = next(run.rollouts).micro_batches[0]
    before = np.asarray(policy.log_probs(batch))
    np.testing.assert_allclose(policy.log_probs(batch, reference=True), before, atol=1e-5)
    policy.state = state._replace(trainable=jax.tree.map(lambda x: x + 0.3, state.trainable))
    assert np.abs(policy.log_probs(batch) - before).max() > 1e-2
    np.testing.assert_allclose(policy.log_probs(batch, reference=True), before, atol=1e-5)
    np.testing.assert_allclose(batch.rollouts.reference, before, atol=1e-5)
    assert continued != parts.executor.has_reference
    run.rollouts.close()


RECURRENT = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}


@repeats_parts_of("test_a_stopped_run_goes_on_to_the_bit")
@pytest.mark.parametrize("family", RECURRENT)
def test_states_give_the_sampler_what_the_trainer_computes(make_run, model_folder, family):
    """Answers begin with copies of their prompt's state, packed ones behind a copy of the prompt."""
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | RECURRENT[family] | {"model_type": family}))
    metrics = read_metrics(train(make_run(temperature=0.5)).metrics)
    assert [values["sampling/sampling_logp_difference/mean"] for values in metrics] == pytest.approx([0] * 3, abs=1e-5)
    assert metrics[0]["grad_norm"] > 0


def test_held_out_prompts_are_answered_at_evaluations_and_change_nothing(make_run, write_jsonl, tmp_path):
    rows = [{"question": f"How much are {a} eggs, and why are there no more of them?", "wanted": str(a)} for a in "789"]
    settings = {"steps": 2, "learning_rate": 3e-2}
    plain = make_run(**settings, output=tmp_path / "plain")
    train(plain)
    held_out = make_run(**settings, eval_data=(write_jsonl(rows, "held.jsonl"),), eval_every=1)
    metrics = read_metrics(train(held_out).metrics)
    found = [values["eval_rewards/even/mean"] for values in metrics if "eval_reward" in values]
    assert len(found) == 2 and found[0] != found[1]
    assert adapter(held_out) == adapter(plain)
    with pytest.raises(ValueError, match="--keep is not for --objective grpo: there is no eval loss"):
        make_run(eval_data=held_out.data.eval_data, keep="best")


PHASES = {
    "sampling": (Sampler, "__call__", 2),
    "scoring": (Judge, "score", 2),
    "training": (training, "train_step", 4),
    "saving": (Checkpoints, "save", 3),
}


class KilledError(Exception):
    pass


def stop_at(monkeypatch, phase: str, count: int | None = None) -> None:
    """Raise in place of the n-th call of a phase."""
    cls, name, usual = PHASES[phase]
    count = usual if count is None else count
    original, calls = getattr(cls, name), []

    def counted(*args, **options):
        calls.append(name)
        if len(calls) == count:
            raise KilledError
        return original(*args, **options)

    monkeypatch.setattr(cls, name, counted)


def adapter(config) -> bytes:
    return (config.run.output / "adapter" / "adapter_model.safetensors").read_bytes()


PAIRS = {"num_iterations": 2}
LEFT_OUT = {"objective": "rloo", "steps_per_generation": 2}


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        ({**PAIRS, "staleness": 1}, ["training"]),
        repeat({"staleness": 2}, ["training"]),
        repeat(PAIRS, [*PHASES]),
        repeat(LEFT_OUT, [*PHASES]),
        repeat({**PAIRS, "staleness": 1}, [*PHASES]),
    ],
)
def test_a_stopped_run_goes_on_to_the_bit(make_run, tmp_path, monkeypatch, caplog, settings, phases):
    """Steps in pairs on the same answers, each saved: a stop between those of the second pair, or in a phase."""
    settings = {"steps": 5, "save_every": 1, "learning_rate": 3e-2, **settings}
    whole = make_run(**settings, output=tmp_path / "whole")
    train(whole)
    for phase in phases:
        config = make_run(**settings, output=tmp_path / phase)
        with monkeypatch.context() as patch:
            stop_at(patch, phase)
            with pytest.raises(KilledError):
                train(config)
        train(replace(config, run=replace(config.run, resume=True)))
        assert adapter(config) == adapter(whole), phase
        assert rollouts(config) == rollouts(whole), phase
        assert not list((config.run.output / "rollouts").glob("*.npz"))[1:]  # those of finished steps are deleted
    assert "has changed" not in caplog.text


class Roomy:
    """Answers whose sampling gains by any further slot, and moves nothing without one."""

    def pays_moving(self, size, arrays, slots, more):
        return more > slots


class Moves(list[bool]):
    """Record if moments are on the host in each sampling, and those that the last step returned."""

    after = ()


@pytest.fixture
def tell_moves(monkeypatch):
    """tell_moves(free, size) → moves of moments that are taken to have this size, with so many bytes beside them."""
    divided = Sampler._divided

    def make(free: float, size: float):
        found = Moves()

        def idle(run, policy):
            moments = IdleMoments(policy, Roomy())
            moments.bytes = size

            def seen(*arguments):
                found.append(on_host(policy.state))
                return divided(*arguments)

            monkeypatch.setattr(Sampler, "_divided", seen)
            return moments

        def on_host(state):
            kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer)}
            moved = kinds == {"pinned_host"}
            assert moved or kinds == {"device"}
            assert all(leaf.is_deleted() == moved for leaf in found.after)  # whoever holds them
            return moved

        monkeypatch.setattr(rollout_policy, "idle_moments", idle)
        monkeypatch.setattr(sampler, "free_bytes", lambda *, device: free)
        return found

    return make


@pytest.mark.parametrize("settings", [{}, repeat(PAIRS)])
def test_moments_on_the_host_while_answers_are_sampled_change_no_bit(
    make_run, tmp_path, monkeypatch, tell_moves, write_jsonl, settings
):
    held_out = write_jsonl([{"question": "What is 7 plus 1?", "wanted": "8"}], "held.jsonl")
    settings = {"steps": 3, "save_every": 1, "learning_rate": 3e-2, **settings}
    settings |= {"eval_data": (held_out,), "eval_every": 2}
    whole, moved = (make_run(**settings, output=tmp_path / name) for name in ("whole", "moved"))
    train(whole)
    found, step = tell_moves(2e5, 1e9), training.train_step

    def noted(parts, state, *rest):
        before = jax.tree.leaves(state.optimizer)
        assert {leaf.sharding.memory_kind for leaf in before} == {"device"} and all(leaf.committed for leaf in before)
        state, result = step(parts, state, *rest)
        found.after = jax.tree.leaves(state.optimizer)
        return state, result

    monkeypatch.setattr(training, "train_step", noted)
    with monkeypatch.context() as patch:
        stop_at(patch, "scoring", 2)
        with pytest.raises(KilledError):
            train(moved)
    train(replace(moved, run=replace(moved.run, resume=True)))
    assert adapter(moved) == adapter(whole) and rollouts(moved) == rollouts(whole)
    assert len(found) > 3 and all(found)


def test_moments_stay_where_rates_are_unknown_training_goes_on_or_the_host_has_too_little(make_run, monkeypatch):
    class Policy:
        state = SimpleNamespace(optimizer={"mu": jax.numpy.zeros((4, 8)), "nu": jax.numpy.zeros(3)})

    policy = Policy()

    def found(**settings):
        run = resolve(make_run(**settings))
        run.rollouts.close()
        return idle_moments.idle_moments(run, policy)

    assert found() is None  # a CPU
    monkeypatch.setattr(idle_moments, "lookup_gpu", lambda name: find_gpu("H200"))
    monkeypatch.setattr(idle_moments, "device_gpu", lambda device: find_gpu("H200"))
    moments = found()
    assert moments.bytes == 4 * (4 * 8 + 3) and not moments.pays_moving(8, 8)
    assert found(staleness=1) is None
    monkeypatch.setattr(idle_moments, "available_memory", lambda: 300)
    assert found() is None


@repeats_parts_of("test_a_stopped_run_goes_on_to_the_bit")
def test_older_weights_differ_from_the_present_ones_as_training_tells(make_run, tmp_path):
    """Where training changes nothing, answers are those of a run that samples and trains by turns."""
    runs = {}
    for name, changes in {"turns": {}, "still": {"staleness": 2}, "moving": {"staleness": 1}}.items():
        rate = 3e-2 if name == "moving" else 1e-30
        runs[name] = make_run(**changes, learning_rate=rate, output=tmp_path / name)
        train(runs[name])
    assert rollouts(runs["still"]) == rollouts(runs["turns"]) != rollouts(runs["moving"])
    with pytest.raises(ValueError, match="--importance-sampling-mode none is not for --staleness 1: it corrects"):
        make_run(staleness=1, importance_sampling_mode="none")
    metrics = read_metrics(runs["moving"].run.output / "metrics.jsonl")
    assert [values["staleness"] for values in metrics] == [0, 1, 1]
    first, *others = (values["sampling/sampling_logp_difference/mean"] for values in metrics)
    assert first < 1e-5 < 1e-3 < min(others)


def test_rewards_that_would_differ_are_judged_once(make_run, tmp_path, monkeypatch):
    rewards = tmp_path / "chance.py"
    rewards.write_text("import random\n\ndef chance(completion):\n    return random.random()\n")
    config = make_run(reward=(f"{rewards}:chance",), steps=1)
    with monkeypatch.context() as patch:
        stop_at(patch, "saving", 1)
        with pytest.raises(KilledError):
            train(config)
    before = rollouts(config)
    train(replace(config, run=replace(config.run, resume=True)))
    assert rollouts(config) == before


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, repeat({"file": REWARDS.replace("== 0", "== 1")})])
def test_answers_that_other_settings_or_functions_kept_are_not_taken(make_run, tmp_path, monkeypatch, changes):
    """A run that was stopped before its first checkpoint answers and judges anew."""
    stopped = make_run(steps=1)
    with monkeypatch.context() as patch:
        stop_at(patch, "saving", 1)
        with pytest.raises(KilledError):
            train(stopped)
    before = [line["rewards"]["even"] for line in rollouts(stopped)]
    changes = dict(changes)
    if "file" in changes:
        (tmp_path / "rewards.py").write_text(changes.pop("file"))
    train(make_run(steps=1, **changes, resume=True))
    assert before != [line["rewards"]["even"] for line in rollouts(stopped)]


@pytest.fixture
def make_distillation(make_run, model_folder, write_jsonl):
    """Build a run on two chats with answers, whose teacher is the base under a system message."""
    shape = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(
        json.dumps(shape | {"initializer_range": 0.5})
    )  # or prompts hardly matter
    answered = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": answered, "hint": "one"},
        {"messages": answered[:1], "completion": answered[1:], "hint": "two"},
    ]
    data = write_jsonl(rows, "answered.jsonl")

    def make(**changes):
        given = {"data": (data,), "objective": "distill", "reward": (), "num_generations": None, "teacher": "base"}
        return make_run(**given | {"teacher_system": "The hint is {hint}.", "generation_batch_size": 4} | changes)

    return make


def test_a_base_under_a_privileged_prompt_is_distilled(make_distillation):
    config = make_distillation(beta=0.0, steps=8, learning_rate=3e-2, lmbda=0.5, sft_alpha=0.01)
    lines = read_metrics(train(config).metrics)
    losses = [line["loss"] for line in lines]
    assert min(losses[-3:]) < 0.8 * max(losses[:3]) and losses[0] > 0.01
    assert {line["sft_loss"] > 0 for line in lines} == {True, False}  # of the rows' answers alone
    answers = [line["answer"] for line in rollouts(config)]
    assert 0 < sum("b" in answer and len(answer) < 3 for answer in answers) < len(answers)  # some are the rows'


@repeats_parts_of("test_a_base_under_a_privileged_prompt_is_distilled")
@pytest.mark.parametrize("settings", [{"dora": True}, repeat({})])
def test_a_base_is_what_training_begins_with_whatever_the_adapters(make_distillation, settings):
    config = make_distillation(teacher_system=None, steps=2, learning_rate=3e-2, **settings)
    losses = [line["loss"] for line in read_metrics(train(config).metrics)]
    assert losses[0] == pytest.approx(0, abs=1e-5) and losses[1] > 1e-3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher": None}, "needs --teacher"),
        (
            {"objective": "distill_tokens", "teacher_server": ("http://x/v1",)},
            "--teacher is not for --objective distill_tokens: it learns from servers",
        ),
        ({"objective": "distill_tokens", "teacher": None}, "needs --teacher-server: it asks a server"),
        ({"teacher_server": ("http://x/v1",)}, "--teacher-server is not for --objective distill: it needs whole"),
        ({"modules_to_save": ("lm_head",)}, "--modules-to-save is not for --teacher base: base is the model without"),
        ({"router_z_loss": 0.1}, "--router-z-loss is not for --objective distill: its losses are no means over tokens"),
        ({"teacher_system": "The hint is {key}."}, r"answered.jsonl:1: --teacher-system: no column 'key' in the row"),
        ({"dynamic_sampling": True}, "--dynamic-sampling is not for --objective distill: it chooses prompts by their"),
        ({"staleness": 1}, "--staleness is not for --objective distill: it corrects for no older weights"),
        ({"documents_per_step": 4}, "--documents-per-step is not for --objective distill: --generation-batch-size has"),
        ({"objective": "grpo", "teacher": None, "reward": ("exact",)}, "--teacher-system is not for --objective grpo"),
        ({"teacher_system": "A set {"}, r"answered.jsonl:1: --teacher-system: .*and \{\{ and \}\} for braces"),
        (
            {"objective": "grpo", "teacher": None, "teacher_system": None, "num_generations": 1, "reward": ("exact",)},
            "--num-generations 1",
        ),
        ({"max_completion_length": 120}, r"answered.jsonl:1: a prompt of \d+ tokens leaves no room for an answer"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_weights_load(make_distillation, changes, text):
    with pytest.raises(ValueError, match=text):
        train(make_distillation(**changes))


@pytest.mark.parametrize(
    ("rows", "changes", "text"),
    [
        ([{"prompt": "a"}], {"environment": "game.py:reply"}, "data.jsonl:1: --environment needs prompts of messages"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a"}],
            {"objective": "distill", "teacher": "base", "reward": (), "num_generations": None, "lmbda": 0.9},
            "data.jsonl:2: --lmbda below 1 needs rows with answers, and this one has none",
        ),
        (
            [{"prompt": "a", "wanted": "b"}],
            {"reward": ("exact",)},
            "--reward exact: ValueError: nothing is given for its parameter answer; .*completion_ids, wanted",
        ),
    ],
)
def test_rows_that_settings_cannot_use_are_refused_before_weights_load(
    make_run, write_jsonl, rows, changes, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    with pytest.raises(ValueError, match=text):
        resolve(make_run(data=(write_jsonl(rows, "data.jsonl"),), **changes))


def test_servers_teach_rows_that_name_them(make_distillation, write_jsonl, monkeypatch):
    """One prefers tokens of even ids, the other of odd ones; the model comes nearer to each on its rows."""

    class Server(ServedTeacher):
        def __init__(self, url, model, seconds):
            self.model = model

        def check(self, tokens, tokenizer, images):
            pass

        def begin(self, tokens, images):
            scores = Future()
            scores.set_result(np.where((np.array(tokens[1:]) + (self.model == "odd")) % 2, -9.0, -4.0))
            return scores

        def close(self):
            pass

    monkeypatch.setattr(teachers, "ServedTeacher", Server)
    rows = [{"messages": [{"role": "user", "content": f"{name}?"}], "teacher": name} for name in ("odd", "even")]
    servers = tuple(f"{name}=http://127.0.0.1:1/v1?model={name}" for name in ("odd", "even"))
    settings = {"objective": "distill_tokens", "teacher": None, "teacher_system": None, "teacher_server": servers}
    config = make_distillation(data=(write_jsonl(rows, "two.jsonl"),), **settings, steps=12, learning_rate=3e-2)
    found = [line["teacher_kl"] for line in read_metrics(train(config).metrics)]
    assert np.mean(found[-3:]) < np.mean(found[:3]) - 0.3


def test_a_teacher_of_another_vocabulary_is_refused(make_distillation, tmp_path, make_tokenizer):
    folder = tmp_path / "teacher"
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"has another vocabulary \(1 tokens differ"):
        train(make_distillation(teacher=str(folder)))


def test_inputs_named_by_a_path_are_in_the_fingerprint(make_distillation, with_weights, tmp_path):
    teacher, tokens = tmp_path / "teacher", tmp_path / "tokens.txt"
    shutil.copytree(tmp_path / "model", teacher)
    tokens.write_text("<one>\n")
    weights = load_file(teacher / "model.safetensors")
    config = make_distillation(teacher=str(teacher), teacher_system=None)
    before = fingerprint(resolve(config))
    check_fingerprint(before | {"inputs": {}}, before | {"inputs": {}})
    save_file({name: value * 1.5 for name, value in weights.items()}, teacher / "model.safetensors")
    with pytest.raises(ValueError, match=r"inputs.teacher: saved '\w+', now '\w+' \(digests: what lies at this path"):
        check_fingerprint(before, fingerprint(resolve(config)))
    save_file(weights, teacher / "model.safetensors")
    check_fingerprint(before, fingerprint(resolve(config)))
    check_fingerprint({name: value for name, value in before.items() if name != "inputs"}, before)  # an older version's

    def tells(change, **settings) -> bool:
        before = fingerprint(resolve(with_weights(**settings)))
        change()
        try:
            check_fingerprint(before, fingerprint(resolve(with_weights(**settings))))
        except ValueError as error:
            return "inputs." in str(error)
        return False

    assert tells(lambda: tokens.write_text("<two>\n"), new_tokens=tokens)
    train(with_weights(steps=1, output=tmp_path / "first"))
    adapter = tmp_path / "first" / "adapter"

    def halve() -> None:
        save_file({n: v / 2 for n, v in load_file(adapter / TENSORS).items()}, adapter / TENSORS)

    assert tells(halve, adapter=adapter, rank=LoraConfig().rank)


def test_a_teacher_and_reward_models_have_their_place_in_the_plan(make_distillation, tmp_path):
    folder = str(tmp_path / "model")
    beside = [
        resolve(make_distillation(**changes)).workload.other_models
        for changes in (
            {},
            {"teacher": folder, "teacher_system": None},
            {"teacher": folder, "teacher_system": None, "teacher_quantize": "int8"},
            {"reward": (f"model?folder={folder}",)},
        )
    ]
    assert beside[0] == 0 and beside[1] == beside[3] > beside[2] > 0
    workload = resolve(make_distillation()).workload
    extended = replace(workload, other_models=2**30)
    plans = [plan(each, "H100", remat="full", weights="device").device_bytes for each in (workload, extended)]
    assert plans[1] - plans[0] >= 2**30
    with pytest.raises(ValueError, match="--teacher-quantize is not for --teacher base: base is stored as the model"):
        make_distillation(teacher_quantize="nf4")


GAME = """
def reply(messages, wanted):
    turns = [message for message in messages if message["role"] == "assistant"]
    if len(turns) == 3:
        return len(turns[-1]["content"]) / 100
    return {"role": "user", "content": "not " + wanted} if len(turns) == 1 else "again"
"""


@repeats_parts_of("test_episodes_go_on_to_the_bit")
def test_conversations_with_an_environment_train_the_models_turns_alone(make_run, tmp_path, monkeypatch):
    (tmp_path / "game.py").write_text(GAME)
    trained = []
    make_groups = loop.groups_of
    monkeypatch.setattr(loop, "groups_of", lambda *values: trained.append(make_groups(*values)) or trained[-1])
    settings = {"reward": (), "environment": f"{tmp_path}/game.py:reply", "max_turns": 3, "learning_rate": 3e-2}
    tokenizer = load_tokenizer(tmp_path / "model")
    words = [token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens]
    settings["stop_tokens"] = tuple(sorted(words)[:100])  # or a random model would not end its turns
    config = make_run(**settings, max_completion_length=60, seq_len=256, steps=2, temperature=0.5)
    lines = read_metrics(train(config).metrics)
    for values in lines:
        assert values["sampling/sampling_logp_difference/mean"] < 1e-5  # later turns see what training sees
        assert values["reward"] == pytest.approx(values["rewards/environment/mean"])
    answers = [answer for groups in trained for group in groups for answer in group.answers]
    several = [answer for answer in answers if not answer.counted.all()]
    assert several
    for answer in several:
        assert np.isnan(answer.log_probs[~answer.counted]).all() and np.isfinite(answer.log_probs[answer.counted]).all()
        said = tokenizer.decode(answer.tokens[~answer.counted])
        assert said.startswith("<|im_end|>\n<|im_start|>user\nnot ")
        assert said.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_equal_rewards_are_said_once(make_run, caplog):
    train(make_run(reward=("length?soft=100&hard=200",), steps=2))
    assert [record.message for record in caplog.records if "same reward" in record.message][1:] == []
    assert "step 1: all answers to each prompt have the same reward" in caplog.text


@repeats_parts_of("test_answers_that_other_settings_or_functions_kept_are_not_taken")
def test_changed_functions_are_said_where_a_run_goes_on(make_run, tmp_path, caplog):
    file = tmp_path / "length.py"
    file.write_text("def length(completion):\n    return len(completion)\n")
    settings = {"reward": (f"{file}:length",), "save_every": 1}
    train(make_run(**settings, steps=1))
    file.write_text("def length(completion):\n    return -len(completion)\n")
    train(make_run(**settings, steps=2, resume=True))
    assert f"{file} has changed since step 1: further answers are judged by it" in caplog.text


def test_answers_without_rewards_are_said_once(make_run, tmp_path, caplog):
    (tmp_path / "nothing.py").write_text("def none(completion):\n    return None\n")
    train(make_run(reward=(f"{tmp_path}/nothing.py:none",), steps=2))
    (said,) = (record.message for record in caplog.records if "nothing is learned" in record.message)
    assert said.startswith("step 1: 0 of ")


@repeats_parts_of("test_equal_rewards_are_said_once")
def test_steps_without_an_ended_answer_to_train_on_are_said_once(make_run, caplog):
    train(make_run(mask_truncated_completions=True, max_completion_length=1, steps=2))
    assert caplog.text.count("all answers reached --max-completion-length and leave the loss") == 1


def test_a_reward_model_of_this_vocabulary_judges(make_run, make_config, tmp_path, write_jsonl, monkeypatch):
    pairs = [{"prompt": f"say {n}", "chosen": "a b", "rejected": "c"} for n in range(4)]
    data = write_jsonl(pairs, "pairs.jsonl")
    train(make_config(data=(data,), objective="reward", steps=1, output=tmp_path / "reward"))
    folder, judged = tmp_path / "reward" / "adapter", []
    score = Judge.score
    monkeypatch.setattr(Judge, "score", lambda self, written: judged.append(written) or score(self, written))
    config = make_run(reward=(f"model?folder={folder}",), steps=1)
    train(config)
    documents = [[*group.prompt.tokens, *ids] for group in judged[0] for ids in group.ids]
    expected = RewardScorer(AssistantConfig(adapter=folder)).score(documents)
    assert [line["rewards"]["model"] for line in rollouts(config)] == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) > 1


@repeats_parts_of("test_answers_that_other_settings_or_functions_kept_are_not_taken")
def test_a_run_that_replaces_another_takes_none_of_its_answers(make_run, tmp_path, monkeypatch):
    config = make_run(save_every=100, steps=3)
    with monkeypatch.context() as patch:
        stop_at(patch, "training", 2)
        with pytest.raises(KilledError):
            train(config)
    assert len(list((config.run.output / "rollouts").glob("*.npz"))) == 2
    settings = {"steps": 1, "learning_rate": 5e-2, "temperature": 0.9}
    replaced, fresh = make_run(**settings, overwrite=True), make_run(**settings, output=tmp_path / "fresh")
    train(replaced)
    train(fresh)
    assert rollouts(replaced) == rollouts(fresh)


COUNTER = """
import random


class Counter:
    turn_reward = None

    def reset(self, wanted, **row):
        self.said = []
        return " " * random.randrange(1, 4) + "count"

    def __call__(self, message, last):
        self.said.append(len(message))
        self.turn_reward = float(len(message) % 3)
        return None if last else "more" * len(self.said)

    def get_reward(self):
        return sum(self.said) / 10

    def state(self):
        return self.said

    def restore(self, said):
        self.said = said
"""
STOPS = 100


@pytest.fixture
def make_agent(make_run, tmp_path):
    """Settings of runs with an environment whose prompts differ from episode to episode."""
    (tmp_path / "counter.py").write_text(COUNTER)
    settings = {"reward": (), "environment": f"{tmp_path}/counter.py:Counter", "max_turns": 3, "learning_rate": 3e-2}
    make_run(**settings)
    tokenizer = load_tokenizer(tmp_path / "model")
    words = [token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens]
    settings["stop_tokens"] = tuple(sorted(words)[:STOPS])  # or a random model would not end its turns
    settings |= {"max_completion_length": 60, "seq_len": 256, "steps": 2, "temperature": 0.5}
    return lambda **changes: make_run(**settings | changes)


def check_episodes(config):
    """Require turns with rewards of their own, of which an episode's is the sum."""
    for line in rollouts(config):
        said = [message for message in line["turns"] if message["role"] == "assistant"]
        assert line["turns"][0]["content"].strip() == "count" and len(line["turn_rewards"]) == len(said)
        total = sum(len(message["content"]) for message in said) / 10 + sum(line["turn_rewards"])
        assert line["rewards"]["Counter"] == pytest.approx(total)


@repeats_parts_of("test_episodes_go_on_to_the_bit")
@pytest.mark.parametrize("settings", [{}, {"history": "branch"}, {"credit": "turn", "beta": 0.1}])
def test_episodes_train_their_own_prompts_and_turns(make_agent, settings):
    config = make_agent(**settings, num_iterations=2)
    lines = read_metrics(train(config).metrics)
    for values in lines[::2]:
        assert values["sampling/sampling_logp_difference/mean"] < 1e-5  # training sees what was sampled
        assert values["episodes/turns"] > 1 and values["episodes/died"] == 0
    check_episodes(config)


@pytest.mark.parametrize("count", [repeat(3), 20, repeat(40)])
def test_episodes_go_on_to_the_bit(make_agent, tmp_path, monkeypatch, count):
    """Turns that are written anew are decoded among others, which moves sampling's own log-probabilities."""
    make_agent = partial(make_agent, save_every=1, importance_sampling_mode="none")

    def without_log_probs(config):
        return [{name: value for name, value in line.items() if name != "log_probs"} for line in rollouts(config)]

    whole = make_agent(output=tmp_path / "whole")
    for values in read_metrics(train(whole).metrics):
        assert values["episodes/turns"] > 1 and values["episodes/died"] == 0
    check_episodes(whole)
    config = make_agent(output=tmp_path / "stopped")
    with monkeypatch.context() as patch:
        save, calls = EpisodeFile.save, []

        def saved(self, key, value):
            calls.append(key)
            if len(calls) > count:
                raise KilledError
            save(self, key, value)

        patch.setattr(EpisodeFile, "save", saved)
        with pytest.raises(KilledError):
            train(config)
    train(replace(config, run=replace(config.run, resume=True)))
    assert adapter(config) == adapter(whole) and without_log_probs(config) == without_log_probs(whole)
