"""Clients as users run them, against `jaxglue serve` in a process of its own.

A client is run where it is installed: in this environment, or in `$JAXGLUE_CLIENTS/NAME`, a virtual environment.
"""

import functools
import http.server
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from selection import thorough

pytestmark = thorough("serve/test_server.py")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CLIENTS = Path(__file__).parent / "clients"
MODULES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "langchain": "langchain_openai",
    "llama_index": "llama_index.llms.openai_like",
    "lm_eval": "lm_eval",
    "aider": "aider",
    "verifiers": "verifiers",
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chromium-headless-shell")


def python_of(name: str) -> str | None:
    """Return the Python that has a client."""
    environment = Path(os.environ.get("JAXGLUE_CLIENTS", "/none")) / name.replace("_", "") / "bin" / "python"
    if environment.exists():
        return str(environment)
    found = importlib.util.find_spec(MODULES[name].partition(".")[0])
    return sys.executable if found else None


@pytest.fixture(scope="module")
def pages():
    """The address of a server of web pages."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=CLIENTS)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def model(quickstart, tmp_path_factory):
    """A folder of the quickstart's model, whose chat template shows tools, too."""
    folder = shutil.copytree(quickstart, tmp_path_factory.mktemp("model") / "model")
    template = folder / "chat_template.jinja"
    tools = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    template.write_text(tools + template.read_text())
    return folder


@pytest.fixture(scope="module")
def address(pages, model, tmp_path_factory):
    """The address of `jaxglue serve` with random weights, whose log is a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"serve --random-weights 0 --name tiny --port {port} --allowed-origins {pages} --model {model}".split()
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as file, subprocess.Popen([sys.executable, "-m", "jaxglue", *command], stderr=file) as server:
        while "serving tiny at" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_a_client_is_answered(address, model, name):
    if (python := python_of(name)) is None:
        pytest.skip(f"no {name} here")
    command = [python, CLIENTS / f"{name}_client.py", address, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and done.stdout.endswith("answered\n"), done.stdout + done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_only_pages_of_named_origins_are_answered(address, pages):
    for page, title in ((pages, "answered"), (pages.replace("localhost", "127.0.0.1"), "refused: Failed to fetch")):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
        shown = subprocess.run(
            [*command, f"{page}/page.html?server={address}"], capture_output=True, text=True, timeout=300, check=False
        )
        assert f"<title>{title}</title>" in shown.stdout, shown.stdout + shown.stderr
