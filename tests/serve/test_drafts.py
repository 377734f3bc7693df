"""The server drafts by the folder's head: answers are those without, and clients see how many drafts were accepted."""

import json
import shutil
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import repeats_parts_of

from jaxglue.generation.assistant import Assistant
from jaxglue.generation.config import SamplingConfig
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.loading import random_model
from jaxglue.models import config_from_hf
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.serve.config import ServeConfig
from tests.draft_folders import add_draft

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient

from jaxglue.serve.server import make_app
from jaxglue.serve.service import Service

CONFIG = {
    **{"model_type": "qwen3_5_text", "full_attention_interval": 1, "num_hidden_layers": 2, "head_dim": 16},
    **{"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quickstart):
    """A model of chats with a draft head."""
    folder = tmp_path_factory.mktemp("drafts") / "model"
    raw = json.loads((quickstart / "config.json").read_text()) | CONFIG
    model = random_model(config_from_hf(raw), dtype=jnp.float32, seed=5)
    save_tensors(folder, flatten_names(split_model(model, nnx.Param)[1]))
    (folder / "config.json").write_text(json.dumps(raw))
    for path in set(quickstart.iterdir()) - {quickstart / "config.json"}:
        shutil.copy(path, folder)
    add_draft(folder)
    return folder


def answered(folder, drafts):
    """Return answers of a server, its metrics and its usage."""
    sampling = SamplingConfig(temperature=0.7, top_p=0.9)
    config = ServeConfig(model=folder, name="tiny", drafts=drafts, sampling=sampling)
    assistant = Assistant(config)
    service = Service(assistant, slots=4, length=96, most=8)
    try:
        with TestClient(make_app(assistant, service, config)) as client:  # whose loop stays open between requests
            asked = {"model": "tiny", "max_tokens": 40, "seed": 3, "logprobs": 2}
            found = [
                client.post("/v1/completions", json={**asked, "prompt": prompt, **more}).json()
                for prompt, more in (
                    ("Once", {}),
                    ("Twice", {"n": 2, "temperature": 1.3}),
                    ("Four", {"temperature": 0}),
                )
            ]
            text = found[0]["choices"][0]["text"]
            stop = {"stop": [text[len(text) // 2 :][:3]]}
            found.append(client.post("/v1/completions", json={**asked, "prompt": "Once", **stop}).json())
            while service.running:  # what follows the text that ended the last answer
                time.sleep(0.01)
            return found, client.get("/metrics").text
    finally:
        service.close()


@repeats_parts_of("test_answers_are_those_without_drafts")
def test_answers_are_those_without_drafts_which_usage_and_metrics_count(folder):
    plain, without = answered(folder, "off")
    drafted, metrics = answered(folder, "2")
    for one, other in zip(plain, drafted, strict=True):
        assert "completion_tokens_details" not in one["usage"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        for choice, same in zip(one["choices"], other["choices"], strict=True):
            assert (choice["text"], choice["finish_reason"]) == (same["text"], same["finish_reason"])
            first, second = (each["logprobs"]["token_logprobs"] for each in (choice, same))
            np.testing.assert_allclose(first, second, atol=1e-4)
    details = [answer["usage"]["completion_tokens_details"] for answer in drafted]
    accepted = sum(each["accepted_prediction_tokens"] for each in details)
    assert all(each["rejected_prediction_tokens"] for each in details)
    assert f'vllm:spec_decode_num_accepted_tokens_total{{model_name="tiny"}} {float(accepted)}' in metrics
    assert (
        "spec_decode_num_draft_tokens_total{" not in without
        or 'accepted_tokens_total{model_name="tiny"} 0.0' in without
    )
