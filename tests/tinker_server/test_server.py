"""Loops of the `tinker` SDK over HTTP, without it, and with it where it is installed."""

import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from selection import repeat, repeats_parts_of

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

import jaxglue
from jaxglue.api.session import Session
from jaxglue.tinker.wire import _fields
from tests.tinker_server.test_wire import loss_request

MODEL = str(Path(jaxglue.__file__).parent / "recipes/quickstart/model")
SETTINGS = {"model": MODEL, "random_weights": True, "dtype": "float32", "seq_len": 64, "compilation_cache": None}
KEY = "tml-test"
LORA = {"rank": 4, "train_unembed": False}


@pytest.fixture(scope="module")
def server():
    from jaxglue.tinker.server import TinkerServer

    server = TinkerServer(api_key=KEY, **SETTINGS)
    yield server
    server.close()


class Client:
    """Posts requests and waits for their results."""

    def __init__(self, server):
        self.http = TestClient(server.app, headers={"X-API-Key": KEY})

    def post(self, name, body):
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(f"/api/v1/{name}", **given)

    def call(self, name, body):
        promised = self.post(name, body).json()
        reply = self.post("retrieve_future", {"request_id": promised["request_id"]})
        return reply.content if reply.headers["content-type"] == "application/x-protobuf" else reply.json()


@pytest.fixture
def client(server):
    return Client(server)


@pytest.fixture(scope="module")
def kept_model(server):
    """A model for requests that change nothing of it."""
    return Client(server).call("create_model", {"session_id": "s", "base_model": MODEL, "lora_config": LORA})[
        "model_id"
    ]


@pytest.fixture
def model(client):
    name = client.call("create_model", {"session_id": "s", "base_model": MODEL, "lora_config": LORA})["model_id"]
    yield name
    client.call("unload_model", {"model_id": name})


def read_loss(body):
    """Return the sum and the log-probabilities of a loss response, without the SDK."""
    (record,) = (dict(_fields(value)) for number, value in _fields(body) if number == 2)
    (metric,) = (dict(_fields(value)) for number, value in _fields(body) if number == 3)
    tensor = dict(_fields(dict(_fields(record[2]))[2]))
    sizes = np.frombuffer(tensor[2], np.int64) // 4
    log_probs = np.split(np.frombuffer(tensor[1], np.float32), sizes[1:-1])
    return float(np.frombuffer(metric[2], np.float64)[0]), log_probs


def test_a_supervised_loop_lowers_its_loss_and_goes_on_from_saved_weights(client, model):
    documents = [([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [0, 1, 1, 1]})]
    documents += [([9, 9], {"target_tokens": [9, 2], "weights": [1, 0.5]})]
    request = loss_request(model, documents, "cross_entropy")
    first, log_probs = read_loss(client.call("forward_backward", request))
    expected = sum(-(np.array(a["weights"]) * p).sum() for (_, a), p in zip(documents, log_probs, strict=True))
    assert first == pytest.approx(expected, rel=1e-5) and [len(each) for each in log_probs] == [4, 2]
    for _ in range(4):
        found = client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1e-2}})
        assert found["metrics"]["grad_norm"] > 0 and found["metrics"]["learning_rate"] == pytest.approx(1e-2)
        last, _ = read_loss(client.call("forward_backward", request))
    assert last < 0.9 * first
    client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.0}})
    saved = client.call("save_weights", {"model_id": model, "path": "first"})["path"]
    forward = loss_request(model, documents, "cross_entropy", forward_only=True)
    assert read_loss(client.call("forward_backward", forward))[0] == pytest.approx(last, rel=1e-5)
    read_loss(client.call("forward_backward", request))
    client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 0.1}})
    assert read_loss(client.call("forward_backward", forward))[0] != pytest.approx(last, rel=1e-3)
    assert client.call("load_weights", {"model_id": model, "path": saved, "optimizer": True})["path"] == saved
    assert read_loss(client.call("forward_backward", forward))[0] == pytest.approx(last, rel=1e-5)


@repeats_parts_of("test_sessions_on_one_base_hold_its_weights_once_and_train_as_alone")
def test_two_models_share_their_base(client, server, model):
    other = client.call("create_model", {"session_id": "s", "base_model": MODEL, "lora_config": {**LORA, "rank": 2}})
    sessions = [server._models[name].session for name in (model, other["model_id"])]
    assert sessions[0].frozen is sessions[1].frozen
    documents = [([5, 6, 7], {"target_tokens": [6, 7, 8], "weights": [1, 1, 1]})]

    def losses():
        requests = [loss_request(name, documents, "cross_entropy") for name in (model, other["model_id"])]
        return [read_loss(client.call("forward_backward", request))[0] for request in requests]

    before = losses()
    client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 1e-2}})
    after = losses()
    assert after[0] < before[0] and after[1] == before[1]
    client.call("unload_model", {"model_id": other["model_id"]})


def test_a_finished_session_frees_its_models_whose_weights_train_on_in_another(client, server, monkeypatch):
    done = []

    class Recorded:
        def __init__(self, **settings):
            done.append(("open", settings["rank"], settings["targets"]))

        def save(self, folder):
            done.append(("save", folder.name))

        def load(self, folder, *, optimizer):
            done.append(("load", folder.name, optimizer))

        def close(self):
            done.append(("close",))

    monkeypatch.setattr("jaxglue.tinker.server.Session", Recorded)
    create = {"session_id": "session-1", "model_seq_id": 0, "base_model": MODEL, "lora_config": LORA}
    name = client.call("create_model", create)["model_id"]
    assert name == "session-1:train:0" and "is in training" in client.call("create_model", create)["error"]
    path = client.call("save_weights", {"model_id": name, "path": "first"})["path"]
    assert client.post("sessions/session-1/finish", {"reason": {"type": "success"}}).status_code == 200
    load = {"session_id": "session-2", "model_seq_id": 3, "path": path, "optimizer": False}
    loaded = client.call("load_weights", load)["model_id"]
    assert loaded == "session-2:train:3" and name not in server._models
    opened = ("open", 4, ("all-linear",))
    assert done == [opened, ("save", "first"), ("close",), opened, ("load", "first", False)]
    client.call("unload_model", {"model_id": loaded})


def read_answers(body):
    parts = [dict(_fields(value)) for number, value in _fields(body) if number == 1]
    return [(np.frombuffer(p[2], np.int32), np.frombuffer(p[3], np.float32)) for p in parts]


def test_a_policy_gradient_loop_moves_what_is_sampled_and_samplers_keep_their_weights(client, model):
    """A token is rewarded; sampled log-probabilities are those of the forward pass, so ratios begin at 1."""
    prompt = [5, 6, 7]

    def sample(session, **more):
        chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        params = {"max_tokens": 4, "temperature": 1.0, "seed": 3, "stop": []}
        body = {"prompt": chunks, "num_samples": 6, "sampling_params": params, "sampling_session_id": session}
        return read_answers(client.call("asample", body | more))

    def sampler():
        return client.call("save_weights_for_sampler", {"model_id": model, "sampling_session_seq_id": 1})

    before = sampler()["sampling_session_id"]
    first = answers = sample(before)
    rewarded = int(np.bincount(np.concatenate([tokens for tokens, _ in first])).argmax())
    for _ in range(4):
        documents = []
        for tokens, log_probs in answers:
            advantage = (tokens == rewarded) - np.mean([(each == rewarded).mean() for each, _ in answers])
            zeros = np.zeros(len(prompt) - 1)
            arrays = {"logprobs": [*zeros, *log_probs], "advantages": [*zeros, *advantage]}
            whole = [*prompt, *tokens]
            documents.append((whole[:-1], {"target_tokens": whole[1:], **arrays}))
        total, found = read_loss(client.call("forward_backward", loss_request(model, documents, "importance_sampling")))
        for (_, log_probs), each in zip(answers, found, strict=True):
            np.testing.assert_allclose(each[len(prompt) - 1 :], log_probs, atol=1e-4)
        expected = -sum(float(np.sum(arrays["advantages"])) for _, arrays in documents)
        assert total == pytest.approx(expected, abs=1e-3)
        client.call("optim_step", {"model_id": model, "adam_params": {"learning_rate": 3e-2}})
        answers = sample(sampler()["sampling_session_id"])
    share = [np.mean([(tokens == rewarded).mean() for tokens, _ in each]) for each in (first, answers)]
    assert share[1] > share[0]
    for (tokens, _), (again, _) in zip(first, sample(before), strict=True):
        np.testing.assert_array_equal(tokens, again)


def test_losses_are_tinkers(client, model):
    """By their definitions, from the log-probabilities that come back."""
    old, advantages = np.array([-6.0, -8.0, -7.5]), np.array([1.0, -2.0, 0.5])
    arrays = {"target_tokens": [6, 7, 8], "logprobs": old, "advantages": advantages}

    def run(name, config=None, **further):
        request = loss_request(model, [([5, 6, 7], arrays | further)], name, config, forward_only=True)
        total, (found,) = read_loss(client.call("forward_backward", request))
        return total, found.astype(np.float64)

    total, p = run("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    ratio = np.exp(p - old)
    clipped = np.clip(ratio, 0.5, 1.5)
    assert total == pytest.approx(-np.minimum(ratio * advantages, clipped * advantages).sum(), rel=1e-4)
    assert run("cispo")[0] == pytest.approx(-(np.clip(ratio, 0.8, 1.2) * p * advantages).sum(), rel=1e-4)
    mean = (p - old)[1:].mean()  # over the tokens that the mask marks, and without a gradient
    sequence, run_gspo = np.exp(mean), {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    clipped = np.clip(sequence, 0.9, 1.1)
    expected = -np.minimum(sequence * advantages, clipped * advantages).sum()
    assert run("gspo", run_gspo, sequence_ratio_mask=[0, *[1] * (len(p) - 1)])[0] == pytest.approx(expected, rel=1e-4)
    assert run("dro", {"beta": 0.1})[0] == pytest.approx((0.05 * (p - old) ** 2 - p * advantages).sum(), rel=1e-4)


def test_prompts_have_log_probabilities_also_of_the_likeliest_tokens(client, model):
    tokens = [5, 17, 9, 30, 2]
    forward = loss_request(model, [(tokens[:-1], {"target_tokens": tokens[1:]})], "cross_entropy", forward_only=True)
    expected = read_loss(client.call("forward_backward", forward))[1][0]
    session = client.call("save_weights_for_sampler", {"model_id": model})["sampling_session_id"]
    body = {"sampling_session_id": session, "prompt": {"chunks": [{"tokens": tokens}]}, "num_samples": 1}
    body |= {"sampling_params": {"max_tokens": 1}, "prompt_logprobs": True, "topk_prompt_logprobs": 3}

    def sample(**changes):
        parts = dict(_fields(client.call("asample", body | changes)))
        likely = dict(_fields(parts[3])) if 3 in parts else {}
        return np.frombuffer(parts[2], np.float32), likely

    log_probs, likely = sample()
    assert np.isnan(log_probs[0])
    np.testing.assert_allclose(log_probs[1:], expected, atol=2e-5)
    ids, values = (np.frombuffer(likely[n], kind).reshape(5, 3) for n, kind in ((1, np.int32), (2, np.float32)))
    assert (likely[3], likely[4]) == (3, 5) and (values[0] == -99999).all() and (np.diff(values[1:]) <= 0).all()
    for place in range(1, 5):
        if tokens[place] in ids[place]:
            assert values[place][ids[place] == tokens[place]] == pytest.approx(log_probs[place], abs=2e-5)
    last, _ = sample(prompt_logprobs_last_n=2, topk_prompt_logprobs=0)
    assert np.isnan(last[:3]).all() and np.allclose(last[3:], log_probs[3:], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("optim_step", {"adam_params": {"lr": 1}}, "unknown lr: expected learning_rate"),
        ("optim_step", {"adam_params": [1]}, "adam_params: expected an object"),
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate: expected a number from 0, got -1"),
        ("optim_step", {"adam_params": {"beta1": 1}}, "beta1: expected a number from 0 to below 1, got 1"),
        ("optim_step", {"adam_params": {"learning_rate": True}}, "learning_rate: expected a number from 0, got True"),
        ("create_model", {"lora_config": "x"}, "lora_config: expected an object"),
        *(
            ("create_model", {"lora_config": {"rank": rank}}, "rank: expected a whole number from 1")
            for rank in (1.5, "8", True, 0)
        ),
        ("create_model", {"lora_config": {"train_mlp": "no"}}, "train_mlp: expected true or false"),
        ("save_weights", {"path": "../up"}, "path: expected letters, digits, dots and dashes"),
        ("load_weights", {"path": "tinker://other/weights/x"}, "no weights at"),
        ("load_weights", {"path": "tinker://../weights/x"}, "path: expected letters, digits, dots and dashes"),
        ("load_weights", {"path": "tinker://x/weights/.."}, "path: expected letters, digits, dots and dashes"),
        ("load_weights", {"path": "tinker://x/weights/x", "optimizer": "no"}, "optimizer: expected true or false"),
        ("asample", {"prompt": {"chunks": []}}, "expected a sampling session of the last 16 saved weights"),
    ],
)
def test_bad_requests_fail_with_a_reason(client, kept_model, name, body, message):
    assert message in client.call(name, {"model_id": kept_model, **body})["error"]


def test_so_many_saved_weights_are_kept_and_no_more_samples_than_those_are_asked(client, server, model, monkeypatch):
    monkeypatch.setattr("jaxglue.tinker.server._KEPT_SAMPLERS", 2)
    for name in ("a", "b", "b", "c"):
        client.call("save_weights_for_sampler", {"model_id": model, "path": name})
    assert [path.rpartition("/")[2] for path in server._samplers] == ["b", "c"]
    asked = client.post("asample", {"num_samples": 10**9, "sampling_session_id": next(iter(server._samplers))})
    assert asked.status_code == 400 and "num_samples: expected 1 to 1024" in asked.json()["error"]
    client.call("unload_model", {"model_id": model})
    assert not server._samplers


def test_bad_losses_fail_with_a_reason(client, model):
    arrays = {"target_tokens": [6, 7]}
    for loss, given, message in (
        ("ppo", arrays, "expected target_tokens, logprobs, advantages"),
        ("magic", arrays, "loss_fn: expected cross_entropy"),
        ("cross_entropy", {"target_tokens": [6]}, "expected arrays of the 2 tokens"),
    ):
        found = client.call("forward_backward", loss_request(model, [([5, 6], given)], loss))
        assert message in found["error"]
    assert "no model" in client.call("optim_step", {"model_id": "other", "adam_params": {}})["error"]


@pytest.fixture(scope="module", params=[False, repeat(True)])
def pair(server, request):
    """Two models of ranks 2 and 4, with or without an adapter of the output projection, after a step each."""
    client, names = Client(server), []
    for rank in (2, 4):
        lora = {"rank": rank, "train_unembed": request.param}
        names.append(client.call("create_model", {"base_model": MODEL, "lora_config": lora})["model_id"])
        train(client, names[-1], rank)
    yield names
    for name in names:
        client.call("unload_model", {"model_id": name})


def train(client, name, weight):
    documents = [([5, 6, 7, 8], {"target_tokens": [6, 7, 8, 9], "weights": [weight] * 4})]
    client.call("forward_backward", loss_request(name, documents, "cross_entropy"))
    client.call("optim_step", {"model_id": name, "adam_params": {"learning_rate": 0.05}})


@repeats_parts_of("test_losses_that_wait_share_rows_and_have_the_gradients_of_each_alone")
def test_requests_that_wait_are_answered_together(client, server, pair, monkeypatch):
    """By several models' adapters, of several ranks, with a bad request among them; each as alone."""

    def save(name, path):
        return client.call("save_weights_for_sampler", {"model_id": name, "path": path})["path"]

    saved = [save(pair[0], "a"), save(pair[1], "a")]
    train(client, pair[1], 4)
    saved.append(save(pair[1], "b"))
    bodies = [
        {"prompt": {"chunks": [{"tokens": tokens}]}, "num_samples": 2, "sampling_params": {"max_tokens": n, "seed": n}}
        | {"sampling_session_id": saved[which]}
        for tokens, n, which in (([5, 6, 7], 4, 0), ([8, 9], 3, 1), ([10**6], 2, 1), ([5, 6, 7], 5, 2), ([8], 3, 0))
    ]
    alone = [client.call("asample", body) for body in bodies]
    sizes, sample_tokens = [], Session.sample_tokens

    def counting(session, requests, *rest):
        sizes.append([None if request.ranks is None else int(request.ranks.sum()) for request in requests])
        return sample_tokens(session, requests, *rest)

    monkeypatch.setattr(Session, "sample_tokens", counting)
    held = threading.Event()
    server._worker.submit(held.wait)
    names = [client.post("asample", body).json()["request_id"] for body in bodies]
    held.set()
    replies = [client.post("retrieve_future", {"request_id": name}) for name in names]
    assert sizes == [[2, 2, 4, 4]] and "vocabulary" in replies[2].json()["error"] and "vocabulary" in alone[2]["error"]
    together = [read_answers(reply.content) for number, reply in enumerate(replies) if number != 2]
    expected = [read_answers(reply) for number, reply in enumerate(alone) if number != 2]
    for answers, others in zip(together, expected, strict=True):
        for (tokens, log_probs), (same, near) in zip(answers, others, strict=True):
            np.testing.assert_array_equal(tokens, same)
            np.testing.assert_allclose(log_probs, near, atol=2e-5)
    assert not np.allclose(together[0][0][1][:3], together[2][0][1][:3], atol=1e-3)  # other weights


def test_losses_that_wait_share_rows_and_have_the_gradients_of_each_alone(client, server, pair, monkeypatch):
    """Of models of several ranks, of which one waits for a step of its own."""
    one, other = pair
    sessions = {name: server._models[name].session for name in pair}

    def ask(name, *texts):
        documents = [
            (each[:-1], {"target_tokens": each[1:], "weights": [len(each)] * (len(each) - 1)}) for each in texts
        ]
        return loss_request(name, documents, "cross_entropy")

    asked = [(one, [5, 6, 7, 8], [9, 9]), (other, [8, 7, 6]), (one, [3, 4, 5])]
    added, add, sizes, token_losses = [], Session.add_gradients, [], Session.token_losses

    def adding(session, gradients):
        added.append((session, gradients))
        add(session, gradients)

    def counting(session, documents, *rest, **options):
        sizes.append(len(documents))
        return token_losses(session, documents, *rest, **options)

    monkeypatch.setattr(Session, "add_gradients", adding)
    alone = [client.call("forward_backward", ask(*each)) for each in asked]
    expected = {name: [gradients for session, gradients in added if session is sessions[name]] for name in sessions}
    added.clear()
    monkeypatch.setattr(Session, "token_losses", counting)
    held = threading.Event()
    server._worker.submit(held.wait)
    promised = [client.post("forward_backward", ask(*each)) for each in asked]
    step = client.post("optim_step", {"model_id": other, "adam_params": {"learning_rate": 1e-3}})
    promised += [
        client.post("forward_backward", ask(other, [8, 7, 6])),
        client.post("forward_backward", ask(one, [10**6, 1])),
    ]
    held.set()
    replies = [client.post("retrieve_future", {"request_id": each.json()["request_id"]}) for each in (*promised, step)]
    assert sizes == [4, 1] and "vocabulary" in replies[4].json()["error"]
    for reply, body in zip(replies[:3], alone, strict=False):
        (total, log_probs), (same, near) = read_loss(reply.content), read_loss(body)
        assert total == pytest.approx(same, rel=1e-5)
        for part, of_alone in zip(log_probs, near, strict=True):
            np.testing.assert_allclose(part, of_alone, atol=1e-5)
    assert read_loss(replies[3].content)[0] < read_loss(alone[1])[0]  # after the step
    together = {name: next(gradients for session, gradients in added if session is sessions[name]) for name in sessions}
    for name, parts in expected.items():
        sums = jax.tree.map(lambda *leaves: sum(leaves), *parts)
        for found, wanted in zip(*map(jax.tree.leaves, (together[name], sums)), strict=True):
            np.testing.assert_allclose(found, wanted, atol=3e-5 * float(np.abs(wanted).max()))


def test_requests_need_the_key(server):
    http = TestClient(server.app)
    assert http.get("/api/v1/healthz").status_code == 401
    assert http.get("/api/v1/healthz", headers={"X-API-Key": KEY}).json() == {"status": "ok"}
    assert http.post("/api/v1/forward_backward", content=b"\xff", headers={"X-API-Key": KEY}).status_code == 400


def test_the_sdk_runs_unchanged(server):
    """Supervised and policy-gradient loops as its guides have them."""
    tinker = pytest.importorskip("tinker")
    import socket

    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runner = uvicorn.Server(uvicorn.Config(server.app, port=port, log_level="warning"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.05)
    run_loops(tinker, f"http://127.0.0.1:{port}", KEY)
    runner.should_exit = True
    thread.join(10)


def run_loops(tinker, url, key):
    """Run both loops of the SDK; losses fall and the sampler answers."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False)
    adam = tinker.AdamParams(learning_rate=1e-2)
    whole = [5, 6, 7, 8, 9]
    inputs = {"target_tokens": whole[1:], "weights": [0.0, 1.0, 1.0, 1.0]}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
    losses = []
    for _ in range(4):
        done = client.forward_backward([datum], "cross_entropy")
        step = client.optim_step(adam)
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < losses[0]
    sampler = client.save_weights_and_get_sampling_client(name="policy")
    prompt, params = tinker.ModelInput.from_ints([5, 6]), tinker.SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    answers = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result().sequences
    assert len(answers) == 3 and all(0 < len(each.tokens) <= 4 for each in answers)
    data = []
    for each in answers:
        tokens = [5, 6, *each.tokens]
        arrays = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0, *each.logprobs],
            "advantages": [0.0, *[1.0 / len(each.tokens)] * len(each.tokens)],
        }
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays))
    found = client.forward_backward(data, "importance_sampling").result()
    assert abs(found.metrics["loss:sum"] + 3) < 1e-3
    client.optim_step(adam).result()
    state = client.save_state("first").result()
    client.load_state(state.path).result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "Qwen/another"}, "base_model: this server trains"),
        ({"base_model": 7}, "base_model: this server trains"),
        ({"lora_config": {**LORA, "rank": 10**9}}, "lora_config.rank: expected at most 4,096"),
    ],
)
def test_a_model_that_is_not_served_is_refused(client, change, message):
    answer = client.call("create_model", {"session_id": "s", "base_model": MODEL, "lora_config": LORA, **change})
    assert message in answer["error"] and answer["category"] == "user"
