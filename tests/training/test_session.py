"""Loops of one's own: the steps of `train` to the bit, own losses, sampling, saving."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxglue
from jaxglue.api.documents import TokenDocument
from jaxglue.engine.executor import Executor
from jaxglue.engine.fp8_errors import FP8Errors
from jaxglue.hf.adapter import load_adapter
from jaxglue.hf.loading import random_model
from jaxglue.hf.tensor_files import TensorFiles
from jaxglue.training import step
from jaxglue.training.record import read_metrics
from tests.selection import repeat, repeats_parts_of


@pytest.fixture
def settings(settings):
    """The settings of a tiny run without data or output."""
    return settings | {"rank": 4, "learning_rate": 1e-2}


@pytest.fixture
def pairs():
    return [{"prompt": f"What is {n}? ", "completion": f"It is {n}.", "reward": float(n % 2)} for n in range(8)]


@pytest.mark.parametrize("options", [repeat({}), {"batch_size": 2, "gradient_accumulation_steps": 2, "dropout": 0.2}])
def test_a_loop_over_batches_equals_train_to_the_bit(settings, chat_rows, tmp_path, options):
    more = {"steps": 4, **options}
    jaxglue.train(data=chat_rows(24), output=str(tmp_path / "run"), log_every=1, **settings, **more)
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in line]
    with jaxglue.Session(**settings, **more) as session:
        for line, batch in zip(lines, session.batches(chat_rows(24), epochs=None), strict=False):
            assert session.forward_backward(batch) == line["loss"]
            assert session.optim_step() == {name: line[name] for name in ("grad_norm", "learning_rate")}
        assert session.step == 4
        saved = load_adapter(session.save(tmp_path / "adapter")).tensors
    trained = load_adapter(tmp_path / "run/adapter").tensors
    assert saved.keys() == trained.keys() and all(np.array_equal(saved[name], trained[name]) for name in saved)


def test_gradients_add_up_and_losses_are_functions_of_tokens_and_columns(settings, pairs):
    def weighted(log_probs, columns):
        return -columns["reward"] * log_probs

    with jaxglue.Session(**settings) as session:
        whole = session.forward_backward(pairs)
        norm = session.optim_step()["grad_norm"]
    with jaxglue.Session(**settings) as session:
        counts = [float(np.count_nonzero(session.log_probs(part)[0])) for part in (pairs[::2], pairs[1::2])]
        shares = [count / sum(counts) for count in counts]
        losses = [
            session.forward_backward(part, lambda log_probs, _, share=share: -share * log_probs)
            for part, share in zip((pairs[::2], pairs[1::2]), shares, strict=True)
        ]
        assert sum(losses) == pytest.approx(whole, rel=1e-5)
        assert session.optim_step()["grad_norm"] == pytest.approx(norm, rel=1e-4)
    with jaxglue.Session(**settings) as session:
        odd = session.forward_backward(pairs[1::2])
        both = session.forward_backward(pairs, weighted, columns={"reward": 1.0})
        assert both == pytest.approx(odd * shares[1], rel=1e-5)


def test_programs_of_few_losses_are_kept(settings, pairs, caplog, monkeypatch):
    monkeypatch.setattr(step, "_OTHER_EXECUTORS", 1)
    with jaxglue.Session(**settings) as session:
        for factor in range(2):
            session.forward_backward(pairs[:1], lambda log_probs, _, factor=factor: -factor * log_probs)
        assert len(session._parts.executors) == 1
    assert "define a loss outside of the loop" in caplog.text


@repeats_parts_of("test_a_session_teaches_another")
@pytest.mark.parametrize(("temperature", "beta", "alpha"), [repeat(1.0, 0.0, 1.0), (2.0, 0.5, 0.5)])
def test_a_teachers_distributions_are_distilled_from_logits(settings, pairs, tiny_model, temperature, beta, alpha):
    """The loss is that of both models' logits, by definition; steps lower it."""
    teacher = tiny_model(vocab_size=400)
    loss = jaxglue.DistillationLoss(teacher, temperature=temperature, beta=beta, alpha=alpha)
    with jaxglue.Session(**settings, batch_size=2) as session:
        student = random_model(session._setup.model, dtype=jnp.float32)  # which the adapter does not change yet
        (batch,) = (step.micro_batches[0] for step in session.batches(pairs))
        run = nnx.jit(lambda model: model(batch.tokens, batch.segments) / temperature)
        logits = [run(model) for model in (teacher, student)]
        p, q = (jax.nn.log_softmax(values) for values in logits)
        mixture = jnp.log(beta * jnp.exp(p) + (1 - beta) * jnp.exp(q))
        forward, reverse = (jnp.sum(jnp.exp(a) * (a - b), -1) for a, b in ((p, mixture if beta else q), (q, mixture)))
        divergence = beta * forward + (1 - beta) * reverse if beta else forward
        weights, own = batch.loss_weights, jax.nn.log_softmax(logits[1] * temperature)
        cross_entropy = -jnp.take_along_axis(own, batch.targets[..., None], -1)[..., 0]
        tokens = alpha * temperature**2 * divergence + (1 - alpha) * cross_entropy
        expected = float(jnp.sum(weights * tokens) / weights.sum())
        first = session.forward_backward(pairs, loss)
        assert first == pytest.approx(expected, rel=1e-4)
        for _ in range(3):
            session.optim_step()
            last = session.forward_backward(pairs, loss)
        assert last < first


def test_sessions_on_one_base_hold_its_weights_once_and_train_as_alone(settings, pairs):
    def losses(session):
        found = []
        for _ in range(3):
            found.append(session.forward_backward(pairs))
            session.optim_step()
        return found

    with jaxglue.Session(**settings) as first, jaxglue.Session(**settings | {"rank": 2}) as alone:
        expected, other = losses(alone), losses(first)
        with jaxglue.Session(base=first, **settings | {"rank": 2}) as second:
            assert second.frozen is first.frozen
            assert losses(second) == expected != other
            assert first.forward_backward(pairs) < other[-1]
        with pytest.raises(ValueError, match="base: a session of"):
            jaxglue.Session(base=first, **settings | {"seed": 1})
        with pytest.raises(ValueError, match="base: adapters alone share"):
            jaxglue.Session(base=first, **settings | {"modules_to_save": ("embed_tokens",)})


def test_a_session_teaches_another(settings, pairs):
    with jaxglue.Session(**settings) as one, jaxglue.Session(**settings) as other:
        loss = jaxglue.DistillationLoss(one)
        assert other.forward_backward(pairs[:2], loss) == pytest.approx(0, abs=1e-6)
        one.forward_backward(pairs)
        one.optim_step()
        assert other.forward_backward(pairs[:2], loss) > 1e-4


@repeats_parts_of("test_gradients_add_up_and_losses_are_functions_of_tokens_and_columns")
def test_rewards_move_what_is_sampled(settings, pairs):
    """Two answers to one prompt, of which one is rewarded: its probability rises, the other's falls."""
    rows = [{**pairs[0], "completion": text, "advantage": sign} for text, sign in (("good", 1.0), ("question", -1.0))]

    def policy_gradient(log_probs, columns):
        return -columns["advantage"] * jnp.exp(log_probs)

    with jaxglue.Session(**settings) as session:
        before = [float(session.log_probs([row])[0].sum()) for row in rows]
        for _ in range(8):
            session.forward_backward(rows, policy_gradient, columns={"advantage": 0.0})
            session.optim_step()
        after = [float(session.log_probs([row])[0].sum()) for row in rows]
    assert after[0] > before[0] and after[1] < before[1]


def test_answers_are_of_the_present_weights_and_have_the_trainers_log_probs(settings, pairs):
    with jaxglue.Session(**settings) as session:
        prompt = [{"role": "user", "content": "What is 3?"}]
        (first,), (other,) = session.sample([prompt, "What is 3?"], max_tokens=6, temperature=0.0)
        assert np.array_equal(first.tokens, other.tokens) and len(first.tokens) <= 6
        template, session.tokenizer.chat_template = session.tokenizer.chat_template, None
        ((text,),) = session.sample(["What is 3?"], max_tokens=6, temperature=0.0)
        assert not np.array_equal(text.tokens, first.tokens)  # the text is continued as it is
        session.tokenizer.chat_template = template
        for _ in range(3):
            session.forward_backward(pairs)
            session.optim_step()
        two = session.sample([prompt], n=2, max_tokens=6, temperature=1.0, top_p=1.0)[0]
        again = session.sample([prompt], n=2, max_tokens=6, temperature=1.0, top_p=1.0)[0]
        assert not np.array_equal(two[0].tokens, two[1].tokens) and not np.array_equal(two[0].tokens, again[0].tokens)
        assert two[0].log_probs.shape == two[0].tokens.shape and (two[0].log_probs <= 0).all()


def test_a_saved_session_goes_on_where_it_was(settings, pairs, tmp_path):
    with jaxglue.Session(**settings) as session:
        for _ in range(2):
            session.forward_backward(pairs)
            session.optim_step()
        folder = session.save(tmp_path / "saved")
        expected = [session.forward_backward(pairs), session.optim_step(), session.forward_backward(pairs)]
        with pytest.raises(ValueError, match="not empty"):
            session.save(folder)
    with jaxglue.Session(**settings) as session:
        session.load(folder)
        assert session.step == 2
        assert [session.forward_backward(pairs), session.optim_step(), session.forward_backward(pairs)] == expected
    assert json.loads((folder / "session/session.json").read_text())["step"] == 2
    assert not any(
        "lora_A" in name and "optimizer" in name for name in TensorFiles([folder / "adapter_model.safetensors"]).tensors
    )
    with jaxglue.Session(**{**settings, "rank": 2}) as session, pytest.raises(ValueError, match="has shape"):
        session.load(folder)


def test_layers_that_fp8_does_not_suit_leave_it(settings, pairs, tmp_path, monkeypatch):
    chosen, options = [], settings | {"matmul": "fp8"}
    monkeypatch.setattr(step, "fp8_errors", lambda *_: FP8Errors([0.1, 0.3], None))
    monkeypatch.setattr(Executor, "multiply_in_fp8", lambda _, layers, head: chosen.append(layers))
    with jaxglue.Session(**options) as session:
        session.forward_backward(pairs)
        session.forward_backward(pairs, lambda log_probs, _: -log_probs)
        session.optim_step()
        folder = session.save(tmp_path / "saved")
    assert chosen == [[True, False]] * 2  # the second program too
    with jaxglue.Session(**options) as session:
        session.load(folder)
    assert chosen == [[True, False]] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "x"}, "data: a session is given its rows step by step"),
        ({"objective": "dpo"}, "objective: a session trains on texts and chats"),
        ({"update_in_backward": True, "clip_norm": 0.0}, "update_in_backward: gradients of a session add up"),
        ({"schedule": "cosine"}, "schedule cosine: it needs the number of steps: give steps, too"),
        ({"learning_rat": 1.0}, "unknown setting 'learning_rat'"),
    ],
)
def test_settings_of_other_things_are_refused(settings, options, message):
    with pytest.raises(ValueError, match=message):
        jaxglue.Session(**{**settings, **options})


def test_rows_are_rows_and_no_names(settings, pairs, write_jsonl):
    with jaxglue.Session(**settings) as session:
        with pytest.raises(ValueError, match="data: no rows in memory"):
            session.forward_backward([])
        with pytest.raises(ValueError, match="data: row 1: expected a dictionary, got str"):
            session.forward_backward([str(write_jsonl(pairs))])
        with pytest.raises(ValueError, match="expected rows, as a list of dictionaries"):
            session.forward_backward(pairs[0])


def test_losses_that_are_not_finite_or_not_of_tokens_change_nothing(settings, pairs):
    with jaxglue.Session(**settings) as session:
        before = session.snapshot()
        with pytest.raises(ValueError, match=r"expected a loss for each token, .* got one of shape \[\]"):
            session.forward_backward(pairs, lambda log_probs, _: -log_probs.mean())
        assert np.isnan(session.forward_backward(pairs, lambda log_probs, _: log_probs * jnp.nan))
        with pytest.raises(ValueError, match="optim_step: the gradients are not finite"):
            session.optim_step()
        assert session.step == 0 and jax.tree.all(jax.tree.map(jnp.array_equal, before, session.snapshot()))
        session.forward_backward(pairs)
        assert np.isfinite(session.optim_step()["grad_norm"])


@pytest.mark.parametrize(
    ("tokens", "targets", "weights", "message"),
    [
        ([5, 9999], [6, 7], [1, 1], "document 2: its tokens hold the id 9999, and the vocabulary has"),
        ([5, 6], [6, -100], [1, 0], "document 2: its targets hold the id -100"),
        ([5, 6], [6, 7], [1, np.nan], "document 2: weights must hold a finite number for each of 2 tokens"),
        ([], [], [], "document 2: expected tokens"),
    ],
)
def test_documents_hold_tokens_and_finite_numbers(settings, tokens, targets, weights, message):
    def document(*parts):
        tokens, targets, weights = map(np.array, parts)
        return TokenDocument(tokens, targets, {"weights": weights})

    def loss(log_probs, columns):
        return -columns["weights"] * log_probs

    with jaxglue.Session(**settings) as session, pytest.raises(ValueError, match=message):
        session.forward_backward_tokens([document([5], [6], [1.0]), document(tokens, targets, weights)], loss)


def test_a_step_without_gradients_is_refused(settings):
    with jaxglue.Session(**settings) as session, pytest.raises(ValueError, match="there are no gradients"):
        session.optim_step()


def test_a_model_is_loaded_with_its_adapter(settings, chat_rows, tmp_path):
    jaxglue.train(data=chat_rows(8), steps=3, output=str(tmp_path / "run"), **settings)
    assert jaxglue.export(adapter=tmp_path / "run/adapter", output=tmp_path / "merged") == tmp_path / "merged"
    logits = nnx.jit(lambda model: model(jnp.arange(1, 9)[None]))
    adapted, named, plain, merged = (
        logits(jaxglue.load_model(*folders, **adapter, dtype=jnp.float32))
        for folders, adapter in (
            ((), {"adapter": tmp_path / "run/adapter"}),
            ((tmp_path / "run/base",), {"adapter": tmp_path / "run/adapter"}),
            ((tmp_path / "run/base",), {}),
            ((tmp_path / "merged",), {}),
        )
    )
    np.testing.assert_array_equal(adapted, named)
    np.testing.assert_allclose(adapted, merged, atol=1e-4)
    assert float(jnp.abs(adapted - plain).max()) > 1e-3


@repeats_parts_of("test_layers_that_fp8_does_not_suit_leave_it")
def test_answers_take_fp8_where_training_does(settings, pairs, monkeypatch):
    """Sampled log-probabilities are the trainer's also once a layer has left FP8."""
    monkeypatch.setattr(step, "fp8_errors", lambda *_: FP8Errors([0.1, 0.9], None))
    found = []
    with jaxglue.Session(**settings | {"matmul": "fp8", "fp8_max_error": 0.2}) as session:
        for _ in range(2):  # before the first step, by FP8 in all layers, and behind it
            ((answer,),) = session.sample(["What is 3?"], max_tokens=6, temperature=1.0, top_p=1.0, seed=5)
            found.append(answer)
            session.forward_backward(pairs)
        session.optim_step()
    with jaxglue.Session(**settings | {"matmul": "fp8", "fp8_max_error": 1.0}) as session:
        session.forward_backward(pairs)
        session.sample(["What is 3?"], max_tokens=6)
        ((everywhere,),) = session.sample(["What is 3?"], max_tokens=6, temperature=1.0, top_p=1.0, seed=5)
    shared = min(len(found[1].log_probs), len(everywhere.log_probs))
    assert not np.array_equal(found[1].log_probs[:shared], everywhere.log_probs[:shared])
