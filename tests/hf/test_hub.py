"""Models by name, against a local server of the hub's API."""

import json
import time
from dataclasses import replace

import huggingface_hub.constants as hub_constants
import pytest
import yaml
from hub_server import SHA, _Handler, start_hub

from jaxglue.commands import main
from jaxglue.data import hub_client
from jaxglue.hf import hub as hub_module
from jaxglue.hf.adapter import find_base
from jaxglue.hf.hub import BaseReference, base_reference, model_path, push_folder
from jaxglue.hf.model_card import model_card
from jaxglue.settings.recipe import from_settings
from jaxglue.training.config import TrainConfig
from jaxglue.training.train import pinned_model

FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
OTHERS = ("pytorch_model.bin", "README.md", "original/model.safetensors", "modeling.py")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A running hub with the model acme/tiny and an empty local cache."""
    hub, server = start_hub()
    folder = tmp_path / "hub" / "tiny"
    for name in (*FILES, *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    hub.repositories["models/acme/tiny"] = folder
    monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hub_module._download.cache_clear()
    yield hub
    server.shutdown()
    server.server_close()


def test_only_a_model_folders_files_are_downloaded(hub):
    folder = model_path("acme/tiny")
    assert hub.downloads() == set(FILES) == {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text()) == {"name": "config.json"}
    assert base_reference(folder) == ("acme/tiny", SHA)


def test_weights_are_left_out_where_they_are_not_needed(hub):
    model_path("acme/tiny", weights=False)
    assert hub.downloads() == set(FILES) - {"model.safetensors"}


def test_local_folder_wins_over_the_hub(hub, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    folder = model_path("acme/tiny")
    assert hub.requests == []
    assert base_reference(folder) == (str(tmp_path / "acme" / "tiny"), None)


def test_downloaded_model_needs_no_network(hub, monkeypatch):
    first = model_path("acme/tiny")
    hub_module._download.cache_clear()
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    seen = len(hub.requests)
    assert model_path("acme/tiny") == first and len(hub.requests) == seen


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("acme/missing", None, "acme/missing is neither a folder here nor a model on the hub"),
        ("acme/gated", None, "acme/gated is gated: accept its terms"),
        ("acme/tiny", "v9", "acme/tiny has no revision 'v9' on the hub"),
    ],
)
def test_refusals_name_the_remedy(hub, name, revision, message):
    hub.gated.add("acme/gated")
    with pytest.raises(ValueError, match=message):
        model_path(name, revision)


def test_offline_mode_downloads_nothing(hub, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="acme/tiny is not in the cache, and HF_HUB_OFFLINE forbids downloads"):
        model_path("acme/tiny")
    assert hub.requests == []


def test_unreachable_hub_is_named(hub, monkeypatch):
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the hub cannot be reached: check the network"):
        model_path("acme/tiny")


CONFIG = """
[model]
method = "lora"
quantize = "none"
[lora]
rank = 16
targets = ["q_proj", "v_proj"]
[data]
data = ["hf:acme/chats:fine", "/home/me/secret/more.jsonl"]
seq_len = 4096
[optimizer]
learning_rate = 0.0002
"""


@pytest.fixture
def run(tmp_path):
    """A run's folder with an adapter."""
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    (run / "summary.json").write_text(json.dumps({"steps": 9, "first_loss": 2.5, "last_loss": 1.25}))
    (run / "loss.png").write_bytes(b"picture")
    (run / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/tiny"}')
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"tensors")
    return run


@pytest.mark.parametrize("part_bytes", [None, 4])
def test_adapter_is_pushed_with_a_card_of_its_run(hub, run, monkeypatch, capsys, part_bytes):
    hub.part_bytes = part_bytes
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_XET", True)
    main(["export", "--adapter", str(run / "adapter"), "--push", "me/mine"])
    assert f"uploaded to {hub.url}/me/mine" in capsys.readouterr().out
    files = hub.uploads["me/mine"]
    assert set(files) == {"README.md", "loss.png", "adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_model.safetensors"] == b"tensors"
    assert sum(request.startswith("/lfs/") for request in hub.requests) == (2 if part_bytes is None else 3)
    card = files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "acme/tiny" and front["datasets"] == ["acme/chats"]
    assert front["library_name"] == "peft" and front["base_model_relation"] == "adapter"
    for line in ("- `more.jsonl`", "| rank | 16 |", "| learning rate | 0.0002 |", "| last loss | 1.25 |", "(loss.png)"):
        assert line in card
    assert "secret" not in card


def test_the_card_shows_the_prompt_format(hub, run, monkeypatch, make_tokenizer):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_XET", True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(run / "adapter")
    main(["export", "--adapter", str(run / "adapter"), "--push", "me/mine"])
    card = hub.uploads["me/mine"]["README.md"].decode()
    chat = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    shown = card.partition("## Prompt format\n\n")[2].partition("\n\n")[0]
    assert shown.splitlines() == [f"    {line}" for line in text.splitlines()]


@pytest.mark.parametrize("adapter", [False, True])
def test_the_card_of_a_gguf_file_says_so(run, adapter):
    base = BaseReference("acme/tiny", SHA)
    card = model_card("me/mine", base, run, adapter=adapter, gguf=["mine-q4_k_m.gguf"])
    front = yaml.safe_load(card.split("---\n")[1])
    assert "gguf" in front["tags"] and "library_name" not in front
    assert "in GGUF, for llama.cpp and Ollama" in card
    command = "llama-server -m BASE.gguf --lora mine-q4_k_m.gguf" if adapter else "ollama run hf.co/me/mine"
    assert f"    {command}\n" in card


def test_push_to_a_malformed_name_is_refused(hub, run):
    with pytest.raises(ValueError, match="--push mine: expected owner/name"):
        push_folder(run / "adapter", "mine", "card")


def test_base_of_an_adapter_is_downloaded(hub, run):
    assert base_reference(find_base(run / "adapter", weights=False)) == ("acme/tiny", SHA)


def test_resumed_run_keeps_the_recorded_commit(hub, tmp_path):
    run = tmp_path / "resumed"
    run.mkdir()
    (run / "config.toml").write_text('[model]\nmodel = "acme/tiny"\nrevision = "v9"\n[data]\ndata = ["x"]\n')
    config = from_settings(TrainConfig, {"model": "acme/tiny", "data": "x", "output": run})
    assert pinned_model(config).revision == SHA
    with pytest.raises(ValueError, match="acme/tiny has no revision 'v9'"):
        pinned_model(replace(config, run=replace(config.run, resume=True)))


def test_file_altered_on_its_way_is_refused_and_loaded_again(hub):
    folder = model_path("acme/tiny")
    hub_module._download.cache_clear()
    (folder / "tokenizer.json").resolve().write_text("{}")
    with pytest.raises(ValueError, match=r"^acme/tiny: tokenizer.json was altered .* start again$"):
        model_path("acme/tiny")
    assert json.loads((model_path("acme/tiny") / "tokenizer.json").read_text()) == {"name": "tokenizer.json"}


@pytest.mark.parametrize("answer", [{"id": None}, [], {"id": "acme/tiny", "siblings": [{}]}, {"sha": 5}])
def test_answers_of_another_form_are_one_line(hub, monkeypatch, answer):
    monkeypatch.setattr(_Handler, "_info", lambda handler, *_: handler._json(answer))
    with pytest.raises(ValueError, match=r"^acme/tiny: the hub") as raised:
        model_path("acme/tiny")
    assert len(str(raised.value).splitlines()) == 1


def test_links_out_of_a_folder_are_not_uploaded(hub, tmp_path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"notes.txt is a link to .*secret, outside its folder"):
        push_folder(tmp_path / "adapter", "acme/new", "# card")
    assert not hub.uploads


OUT = "../../../../escaped"


@pytest.mark.parametrize("place", ["sha", "oid", "lfs", "etag", "linked etag", "commit", "missing commit", "xet"])
def test_a_lying_hub_names_no_files(hub, monkeypatch, tmp_path, place):
    send = _Handler._send
    evil = "a" * 39 + "/" if place == "missing commit" else OUT

    def lie(handler, status, content, headers):
        path = handler.path.partition("?")[0]
        if "/resolve/" in path:
            lies = {"etag": "ETag", "linked etag": "X-Linked-ETag", "commit": "X-Repo-Commit", "xet": "X-Xet-Hash"}
            headers = headers | ({lies[place]: evil} if place in lies else {})
            if place == "missing commit":
                status, content, headers = 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": evil}
        elif place == "sha" and "/tree/" not in path:
            content = content.replace(SHA.encode(), evil.encode())
        elif place in ("oid", "lfs") and "/tree/" in path:
            files = json.loads(content)
            files[0] |= {"oid": evil} if place == "oid" else {"lfs": {"oid": evil, "size": 1, "pointerSize": 1}}
            content = json.dumps(files).encode()
        send(handler, status, content, headers)

    monkeypatch.setattr(_Handler, "_send", lie)
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "cache")}
    with pytest.raises(ValueError, match=r"names a commit or digest '.*', expected 40 or 64 hexadecimal digits"):
        model_path("acme/tiny")
    assert before == {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "cache")}


@pytest.mark.parametrize("revision", ["../../x", "a//b", "/etc", "a/../b", "-x", ""])
def test_revisions_that_are_paths_are_refused(hub, revision):
    with pytest.raises(ValueError, match="is no name of a branch, tag or commit"):
        model_path("acme/tiny", revision)
    assert not hub.requests


@pytest.mark.parametrize(
    ("status", "message"),
    [(429, "status 429: it has had too many requests"), (500, "status 500: try again later"), (503, "status 503: try")],
)
def test_statuses_are_named(hub, monkeypatch, status, message):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(_Handler, "_info", lambda handler, *_: handler._send(status, b"no", {}))
    with pytest.raises(ValueError, match=rf"^acme/tiny is not a folder here, and the hub answers with {message}"):
        model_path("acme/tiny")


def test_a_body_that_is_cut_short_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)

    def cut(handler, *_):
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Length", "99")
        handler.end_headers()
        handler.wfile.write(b'{"id": "acme/tiny", ')

    monkeypatch.setattr(_Handler, "_info", cut)
    with pytest.raises(ValueError, match="the hub's answer is cut short"):
        model_path("acme/tiny")


def test_a_silent_hub_gets_a_line(hub, monkeypatch, caplog):
    monkeypatch.setattr(hub_client, "_PATIENCE", 0.05)
    info = _Handler._info

    def slow(handler, *arguments):
        while not caplog.records:
            time.sleep(0.01)
        info(handler, *arguments)

    monkeypatch.setattr(_Handler, "_info", slow)
    assert model_path("acme/tiny").is_dir()
    assert "127.0.0.1 has not answered for 0 s: still waiting" in caplog.text
