"""The page's server answers this machine's names and the holder of its token, and nobody else."""

import http.client
import json
from threading import Thread

import pytest

from jaxglue.ui.server import PageServer


@pytest.fixture(scope="module")
def server(runs):
    def echo(folder, request):
        if request.get("fail"):
            raise ValueError("refused by name")
        return {"folder": folder.name, "value": float("nan")}

    server = PageServer(runs, 0, {"echo": echo})
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, name, body=None, *, method="POST", headers=None, token=True):
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    sent = {"Authorization": f"Bearer {server.token}"} if token else {}
    connection.request(method, f"/{name}", content if method == "POST" else None, sent | (headers or {}))
    response = connection.getresponse()
    return response.status, response.read().decode(), dict(response.getheaders())


def test_runs_are_sent_once_and_again_when_they_change(server, runs):
    status, text, _ = ask(server, "runs")
    found = json.loads(text)["runs"]
    assert status == 200 and [run["name"] for run in found] == ["sft", "dpo", "grpo"]
    versions = {run["folder"]: run["version"] for run in found}
    assert json.loads(ask(server, "runs", {"versions": versions})[1]) == {}
    (runs[0] / "metrics.jsonl").touch()
    assert "runs" in json.loads(ask(server, "runs", {"versions": versions})[1])


def test_the_page_holds_nothing_of_a_run_and_runs_its_own_program_alone(server):
    status, text, headers = ask(server, "", method="GET", token=False)
    assert status == 200 and "grpo" not in text and server.token not in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_names_are_refused(server, host, method):
    assert ask(server, "runs" if method == "POST" else "", method=method, headers={"Host": host})[0] == 403


@pytest.mark.parametrize("given", [None, "Bearer ", "Bearer wrong", "Bearer \xff"])
def test_a_request_without_the_token_is_refused(server, given):
    status, text, _ = ask(server, "runs", token=False, headers={"Authorization": given} if given else {})
    assert status == 403 and "address that jaxglue ui printed" in text


def test_questions_are_about_runs_of_the_page(server, runs):
    assert json.loads(ask(server, "echo", {"run": str(runs[1])})[1]) == {"folder": "dpo", "value": None}
    assert ask(server, "echo", {"run": "/etc"})[:2] == (400, "this page shows no such run")
    assert ask(server, "echo", {"run": str(runs[1]), "fail": True})[:2] == (400, "refused by name")
    assert ask(server, "nothing", {"run": str(runs[1])})[0] == 400


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 60_000, b'{"a": 1' + b" " * 2**16 + b"}"])
def test_bad_bodies_are_refused_by_status(server, body):
    assert ask(server, "runs", body)[0] in (400, 413)
