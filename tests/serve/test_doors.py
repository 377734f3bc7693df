"""What surrounds all endpoints: origins, log, metrics; tokens; adapters that are loaded while serving."""

import io
import re
import threading
from contextlib import closing
from dataclasses import replace
from urllib.error import HTTPError

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.scheduler import Request
from jaxglue.generation.scoring import ContinuationScorer
from jaxglue.rl.teachers import ServedTeacher
from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.service import Service

GREEDY = SamplingConfig(temperature=0.0, top_p=1.0)
MESSAGES = [{"role": "user", "content": "Hello"}]
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def served(folders):
    """(assistant, service, configuration), of a base with ranks for two adapters that clients load."""
    config = ServeConfig(
        model=folders[0], name="tiny", sampling=GREEDY, adapter_folder=folders[1].parent, adapter_ranks=8
    )
    assistant = Assistant(config)
    service = Service(assistant, slots=4, length=128, most=8)
    yield assistant, service, config
    service.close()


@pytest.fixture(scope="module")
def client(served):
    return TestClient(make_app(*served))


def complete(client, **body):
    reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "Once upon", "max_tokens": 8, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("key", [None, "secret"])
def test_only_named_origins_are_let_in(served, key):
    assistant, service, config = served
    headers = {"authorization": f"Bearer {key}"} if key else {}
    named = replace(config, allowed_origins=("https://chat.example", PAGE), api_key=key)
    client = TestClient(make_app(assistant, service, named))
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = client.options("/v1/chat/completions", headers=asks)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for origin, status in (
        ("https://chat.example", 200),
        (PAGE, 200),
        ("http://localhost:3001", 403),
        ("https://evil.example", 403),
        ("null", 403),
        (None, 200),
    ):
        reply = client.get("/v1/models", headers=headers | ({"origin": origin} if origin else {}))
        assert reply.status_code == status, origin
        assert reply.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    refused = client.options("/v1/models", headers=asks | {"origin": "https://evil.example"})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("origins", "message"),
    [
        (("localhost:3000",), "expected scheme and host"),
        (("http://localhost:3000/",), "expected scheme and host"),
        (("*",), "lets every web page ask: give --api-key"),
    ],
)
def test_origins_are_checked_at_the_start(served, origins, message):
    with pytest.raises(ValueError, match=message):
        replace(served[2], allowed_origins=origins)
    assert replace(served[2], allowed_origins=("*",), api_key="secret")


def test_a_request_is_a_line_of_the_log(client, capsys):
    complete(client, vendor_extension=1)
    client.post("/v1/completions", json={"model": "x\ny", "prompt": "a"})
    client.get("/health")
    first, second = capsys.readouterr().err.strip().split("\n")
    assert re.search(r"POST /v1/completions 200, .* s, first token .* s, tiny: \d+ \+ 8 tokens", first)
    assert first.endswith("ignored: vendor_extension")
    assert re.search(r" 404, .*model 'x\\ny' is not served", second)


def test_metrics_count_requests_tokens_and_times(served):
    client = TestClient(make_app(*served))
    usage = [complete(client)["usage"], complete(client, n=2)["usage"]]
    client.post("/v1/completions", json={"model": "other", "prompt": "a"})
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.split("\n") if line and line[0] != "#")
    label = '{model_name="tiny"}'
    assert float(values[f"vllm:prompt_tokens_total{label}"]) == sum(u["prompt_tokens"] for u in usage)
    assert float(values[f"vllm:generation_tokens_total{label}"]) == sum(u["completion_tokens"] for u in usage) == 24
    assert float(values['vllm:request_success_total{finished_reason="length",model_name="tiny"}']) == 3
    assert float(values[f"vllm:e2e_request_latency_seconds_count{label}"]) == 2
    assert float(values[f"vllm:time_to_first_token_seconds_count{label}"]) == 2
    assert float(values["vllm:num_requests_waiting"]) == float(values["vllm:num_requests_running"]) == 0
    assert 0 <= float(values["vllm:kv_cache_usage_perc"]) <= 1
    wanted = '{handler="/v1/completions",method="POST",status="404"}'
    assert float(values[f"http_requests_total{wanted}"]) == 1


def test_models_say_their_length_and_time(served, client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == 128 and model["created"] > 1.7e9 and model["parent"] is None


def test_tokens_of_texts_and_chats_are_told_and_back(served, client):
    tokenizer = served[0].tokenizer
    reply = client.post("/tokenize", json={"model": "tiny", "prompt": "naïve 東京", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode("naïve 東京") and reply["count"] == len(reply["tokens"])
    assert len(reply["token_strs"]) == reply["count"] and reply["max_model_len"] == 128
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "naïve 東京"}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    answered = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
    assert chat["count"] == answered["usage"]["prompt_tokens"]
    bare = client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["tokens"] == chat["tokens"][: bare["count"]] and bare["count"] < chat["count"]
    long = client.post("/tokenize", json={"messages": [{"role": "user", "content": "word " * 500}]})
    assert long.json()["count"] > 128
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": "a"}), ("/detokenize", {"tokens": [5000]})):
        assert client.post(path, json=body).status_code == 400


def test_an_assistants_message_is_continued(served, client):
    turns = [*MESSAGES, {"role": "assistant", "content": "Good day "}]
    state = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=state).json()["tokens"]
    assert served[0].tokenizer.decode(tokens).endswith("Good day ")
    reply = client.post("/v1/chat/completions", json={**state, "max_tokens": 8}).json()
    wanted = "".join(served[0].answer(tokens, replace(GREEDY, max_tokens=8)))
    assert reply["choices"][0]["message"]["content"] == wanted != ""


def test_max_tokens_are_at_most_the_room(client):
    reply = complete(client, max_tokens=100_000, stop_token_ids=[])
    assert reply["usage"]["total_tokens"] <= 128 and reply["choices"][0]["finish_reason"] in ("length", "stop")
    both = complete(client, prompt=["a", "word " * 100], max_tokens=100_000)
    assert both["usage"]["completion_tokens"] > 10
    refused = client.post("/v1/completions", json={"prompt": "word " * 200, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_repeated_prompt_has_log_probabilities(served, client):
    tokenizer, scorer = served[0].tokenizer, ContinuationScorer(served[0])
    prompts = [tokenizer.encode("Once upon a time"), tokenizer.encode("Numbers"), [5]]
    reply = complete(client, prompt=prompts, max_tokens=1, logprobs=1, echo=True)
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        scores = choice["logprobs"]
        assert "".join(scores["tokens"]) == choice["text"] and len(scores["tokens"]) == len(prompt) + 1
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        if len(prompt) > 1:
            wanted, greedy = scorer.score([(prompt[:1], prompt[1:])])[0]
            assert sum(scores["token_logprobs"][1:-1]) == pytest.approx(wanted, abs=1e-4)
            top = [max(likely.values()) for likely in scores["top_logprobs"][1:-1]]
            assert greedy == all(np.equal(scores["token_logprobs"][1:-1], top))
        assert scores["text_offset"] == [len("".join(scores["tokens"][:i])) for i in range(len(prompt) + 1)]
    alone = complete(client, prompt="Once upon", max_tokens=0, logprobs=2, echo=True)
    assert alone["choices"][0]["text"] == "Once upon" and alone["usage"]["completion_tokens"] == 0
    assert None not in alone["choices"][0]["logprobs"]["token_logprobs"][1:]
    refused = client.post("/v1/completions", json={"prompt": [5, 5000], "max_tokens": 0, "logprobs": 1, "echo": True})
    assert refused.status_code == 400 and "token id 5000" in refused.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0}).status_code == 400


def test_token_ids_are_answered_by_token_ids_with_log_probabilities(served, client):
    """Those of a completion; what would change tokens and is not known is refused."""
    tokenizer = served[0].tokenizer
    prompt, sampling = tokenizer.encode("Once upon a time"), {"max_tokens": 5, "temperature": 0.0, "stop_token_ids": []}
    body = {
        "model": None,
        "token_ids": prompt,
        "sampling_params": {**sampling, "logprobs": 1, "skip_special_tokens": False},
    }
    reply = client.post("/inference/v1/generate", json=body).json()
    (choice,) = reply["choices"]
    completion = complete(client, prompt=prompt, logprobs=0, **sampling)["choices"][0]
    ids = choice["token_ids"]
    assert tokenizer.decode(ids).startswith(completion["text"]) and completion["text"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(values, completion["logprobs"]["token_logprobs"], atol=1e-5)
    assert choice["finish_reason"] == completion["finish_reason"] and reply["usage"]["completion_tokens"] == len(ids)
    for change, message in (
        ({"token_ids": []}, "token_ids must be a list of token ids"),
        ({"token_ids": [10**6]}, "token id 1000000"),
        ({"sampling_params": {"logits_processors": ["x"]}}, "logits_processors is not supported"),
    ):
        refused = client.post("/inference/v1/generate", json={**body, **change})
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]


def test_it_teaches_by_the_log_probabilities_of_texts(served, client, monkeypatch):
    def opened(request, timeout):
        headers, path = {"Content-Type": "application/json"}, request.full_url.removeprefix("http://served")
        reply = client.request(request.get_method(), path, content=request.data, headers=headers)
        if reply.status_code >= 400:
            raise HTTPError(request.full_url, reply.status_code, "", {}, io.BytesIO(reply.content))
        return closing(io.BytesIO(reply.content))

    monkeypatch.setattr("urllib.request.urlopen", opened)
    name, text = client.get("/v1/models").json()["data"][0]["id"], served[0].tokenizer.encode("Once upon a time")
    with closing(ServedTeacher("http://served/v1", name, 5.0)) as teacher:
        teacher.check(text, served[0].tokenizer)
        found = teacher.begin(text).result()
    scorer = ContinuationScorer(served[0])
    sums = [scorer.score([(text[:1], text[1:end])])[0][0] for end in range(2, len(text) + 1)]
    np.testing.assert_allclose(np.cumsum(found), sums, atol=1e-4)


def test_an_adapter_is_loaded_and_unloaded_while_serving(served, client, folders):
    plain = complete(client)["choices"][0]["text"]
    alone = Assistant(ServeConfig(model=folders[0], adapter=folders[1]))
    wanted = "".join(alone.answer(alone.tokenizer.encode("Once upon"), replace(GREEDY, max_tokens=8)))
    load = {"lora_name": "late", "lora_path": folders[1].name}
    for _ in range(3):  # more often than there are ranks
        assert client.post("/v1/load_lora_adapter", json=load).text.startswith("Success")
        models = {model["id"]: model["parent"] for model in client.get("/v1/models").json()["data"]}
        assert models == {"tiny": None, "late": "tiny"}
        assert complete(client, model="late")["choices"][0]["text"] == wanted != plain
        assert complete(client)["choices"][0]["text"] == plain
        scores = complete(client, model="late", max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        assert scores != complete(client, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 400
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
        assert client.post("/v1/completions", json={"model": "late", "prompt": "a"}).status_code == 404
    for name in ("late", "tiny"):
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 404


def test_ranks_of_an_unloaded_adapter_are_free_once_no_answer_uses_them(served, client, folders):
    _, service, _ = served
    load = {"lora_name": "a", "lora_path": str(folders[1])}
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert client.post("/v1/load_lora_adapter", json=load | {"lora_name": "b"}).status_code == 200
    full = client.post("/v1/load_lora_adapter", json=load | {"lora_name": "c"})
    assert full.status_code == 400 and "--adapter-ranks" in full.json()["error"]["message"]
    gate, done = threading.Event(), threading.Event()
    ranks = np.ones(8, np.bool_)

    def listen(event):
        gate.wait(60)
        if event.finish:
            done.set()

    service.submit(Request([5], replace(GREEDY, max_tokens=20), ranks=ranks), listen)
    assert service.uses(ranks)
    gate.set()
    assert done.wait(60)
    service.call(lambda: None).result(60)
    assert not service.uses(ranks)
    for name in ("a", "b"):
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    assert client.post("/v1/load_lora_adapter", json=load | {"lora_name": "c"}).status_code == 200
    client.post("/v1/unload_lora_adapter", json={"lora_name": "c"})


def test_adapters_come_from_their_folder_alone(served, tmp_path, folders):
    assistant, service, config = served
    (tmp_path / "inside").mkdir()
    (tmp_path / "link").symlink_to(folders[1])
    client = TestClient(make_app(assistant, service, replace(config, adapter_folder=tmp_path)))
    for path in ("..", "../x", str(folders[1]), "link", "inside/../..", "none", "\0", "a" * 5000, "", 5):
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
        assert refused.status_code == 400 and "lora_path" in refused.json()["error"]["message"], path
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "inside"}).status_code == 400
    closed = TestClient(make_app(assistant, service, replace(config, adapter_folder=None)))
    assert closed.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"}).status_code == 404
