"""Teachers behind servers: both forms of their log-probabilities, their faults, and rows that choose among them."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from jaxglue.data.images import ImageRules
from jaxglue.rl import teachers
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.teachers import ServedTeachers
from jaxglue.vision.images import ImageSource, digest_of
from jaxglue.vision.processor import Grid
from jaxglue.vision.records import ImageRecord
from jaxglue.vision.rows import Image, PlacedImage


def log_prob(token: int, before: int, shift: float) -> float:
    return -0.1 - (7 * token + before) % 10 / 10 - shift


@contextmanager
def served(form, texts, *, shift=0.0, names=("only",), faults=(), sees=False):
    """Serve a teacher whose log-probabilities are `log_prob`; the first requests end with these statuses.

    One that sees refuses images whose first token is not 7.
    """
    faults, seen = list(faults), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": name} for name in names]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            if faults:
                self.reply({"error": "busy"}, faults.pop(0))
                return
            tokens = body["prompt"]
            if sees and any(tokens[image["token"]] != 7 for image in body.get("images", ())):
                self.reply({"error": "other tokens"}, 400)
                return
            values = [log_prob(*pair, shift) for pair in zip(tokens[1:], tokens, strict=False)]
            said = [texts(token) for token in tokens]
            choice = {"text": "x"}
            if form == "vllm" and "prompt_logprobs" in body:
                rows = zip(tokens[1:], values, said[1:], strict=True)
                of_tokens = [{str(t): {"logprob": v, "decoded_token": s}, "0": {"logprob": -9.0}} for t, v, s in rows]
                choice["prompt_logprobs"] = [None, *of_tokens]
            if form == "openai" and body.get("echo"):
                choice["logprobs"] = {"token_logprobs": [None, *values], "tokens": said}
            self.reply({"choices": [choice]})

        def reply(self, body, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def texts(tokenizer):
    return lambda token: tokenizer.decode([token])


def prompt(teacher=None):
    columns = {} if teacher is None else {"teacher": teacher}
    return Prompt("rows:1", [{"role": "user", "content": "x"}], [70, 71, 72], columns)


@pytest.mark.parametrize("form", ["vllm", "openai"])
def test_log_probabilities_of_a_text_are_read_in_both_forms(form, tokenizer, texts):
    with served(form, texts) as (url, seen), ServedTeachers([url], 5.0) as served_teachers:
        served_teachers.check([prompt()], tokenizer)
        found = served_teachers.begin(prompt(), [70, 71, 72, 9]).result()
    expected = [log_prob(*pair, 0.0) for pair in ((71, 70), (72, 71), (9, 72))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert seen[-1]["prompt"] == [70, 71, 72, 9] and seen[-1]["model"] == "only" and seen[-1]["temperature"] == 0


@pytest.mark.parametrize("sees", [True, False])
def test_a_server_gets_the_images_of_prompts_and_one_that_leaves_them_out_is_refused(tokenizer, texts, sees):
    processor = SimpleNamespace(tokens=lambda grid: 2)
    rules = ImageRules(processor=processor, folder=None, features=(7,), tokens=(7,), positions=True)
    record = ImageRecord(Grid(2, 4), digest_of(b"cat"), ImageSource(data=b"cat"), (0, 0))
    row = Prompt("rows:1", [], [70, 7, 7, 72], {}, records=(record,))
    with served("openai", texts, sees=sees) as (url, seen), ServedTeachers([url], 5.0) as served_teachers:
        if not sees:
            with pytest.raises(ValueError, match="take no images beside tokens: serve the teacher with jaxglue serve"):
                served_teachers.check([row], tokenizer, rules)
            return
        served_teachers.check([row], tokenizer, rules)
        found = served_teachers.begin(row, [7, 7, 70], [PlacedImage(0, Image.of(record))]).result()
    assert len(found) == 2
    (image,) = seen[-1]["images"]
    assert image["token"] == 0 and base64.b64decode(image["image_url"]["url"].partition(",")[2]) == b"cat"


def test_rows_choose_among_several(tokenizer, texts):
    with served("vllm", texts) as (first, _), served("openai", texts, shift=1.0, names=("a", "b")) as (second, seen):
        specs = [f"math={first}", f"code={second}?model=b"]
        with ServedTeachers(specs, 5.0) as served_teachers:
            served_teachers.check([prompt("math"), prompt("code")], tokenizer)
            found = [served_teachers.begin(prompt(name), [70, 71]).result() for name in ("math", "code")]
            np.testing.assert_allclose(found[0] - found[1], 1.0, atol=1e-6)
            assert {body["model"] for body in seen} == {"b"}
            with pytest.raises(ValueError, match=r"rows:1: the column teacher must name one of math, code, got None"):
                served_teachers.check([prompt()], tokenizer)
        with pytest.raises(ValueError, match=r"serves a, b: choose one, as in http://.*/v1\?model=a"):
            ServedTeachers([second], 5.0)


def test_a_server_that_is_busy_is_asked_again(tokenizer, texts, monkeypatch):
    monkeypatch.setattr(teachers, "_PAUSE", 0.01)
    with served("vllm", texts, faults=(503, 429)) as (url, seen), ServedTeachers([url], 5.0):
        assert len(seen) == 3
    with (
        served("vllm", texts, faults=(500,) * 9) as (url, _),
        pytest.raises(ValueError, match="no answer to completio"),
    ):
        ServedTeachers([url], 5.0)


@pytest.mark.parametrize("spec", ["127.0.0.1:8000", "a=http://x/v1,", "file:///etc/passwd", "=http://x"])
def test_what_is_no_address_is_refused(spec):
    with pytest.raises(ValueError, match=r"--teacher-server .* expected an address"):
        ServedTeachers([spec, spec] if spec.startswith("a=") else [spec], 5.0)


def test_servers_without_log_probabilities_or_of_other_tokens_are_refused(tokenizer, texts):
    with served("none", texts) as (url, _), pytest.raises(ValueError, match="return no log-probabilities of prompts"):
        ServedTeachers([url], 5.0)
    others = pytest.raises(ValueError, match=r"token 71 is .* there and .* distilled models have one vocabulary")
    with served("vllm", lambda token: texts(token + 1)) as (url, _), ServedTeachers([url], 5.0) as both, others:
        both.check([prompt()], tokenizer)
