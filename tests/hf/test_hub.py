"""Models by name, against a local server of the hub's API."""

import json

import huggingface_hub.constants as hub_constants
import pytest
from hub_server import SHA, start_hub

from jaxglue.hf import hub as hub_module
from jaxglue.hf.hub import base_reference, model_path

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
