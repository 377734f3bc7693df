"""Wire forms: a further protocol is one registered value, behind the same key and with refusals of its own."""

from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from local_client import TestClient
from starlette.responses import PlainTextResponse

from jaxglue.serve.config import ServeConfig
from jaxglue.serve.server import make_app
from jaxglue.serve.wire import FORMS, Endpoint, Form


def app(quickstart, **settings):
    config = ServeConfig(model=quickstart, name="tiny", **settings)
    assistant = SimpleNamespace(tokenizer=None, stops={0}, ranks=0, voices={}, sight=None)
    return TestClient(make_app(assistant, SimpleNamespace(length=64, failure=None), config))


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_further_form_has_the_key_and_its_own_refusals(quickstart, key):
    async def greet(host, http):
        model = host.models.find(http.query_params.get("model"))
        if "wrong" in http.query_params:
            raise ValueError("no")
        return PlainTextResponse(f"{model.name} {host.service.length}")

    form = Form((Endpoint("/greet", greet, "GET"),), error=lambda refusal: PlainTextResponse(str(refusal), 418))
    with FORMS.scope({"greeting": form}):
        client = app(quickstart, api_key=key)
    headers = {"authorization": f"Bearer {key}"}
    assert client.get("/greet", headers=headers).text == "tiny 64"
    assert (client.get("/greet?wrong", headers=headers).status_code) == 418
    assert client.get("/greet?model=other", headers=headers).text.startswith("model 'other' is not served")
    assert client.get("/greet").status_code == (418 if key else 200)
    assert client.get("/health").status_code == 200
