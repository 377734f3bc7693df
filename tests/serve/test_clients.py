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

pytestmark = pytest.mark.slow
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
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
def address(pages, quickstart, tmp_path_factory):
    """The address of `jaxglue serve` with random weights, whose log is a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        "--model",
        quickstart,
        "--random-weights",
        "0",
        "--name",
        "tiny",
        "--port",
        port,
        "--allowed-origins",
        pages,
    ]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "jaxglue", "serve", *map(str, flags)]
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as server:
        while "serving tiny at" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("name", MODULES)
def test_a_client_is_answered(address, name):
    if (python := python_of(name)) is None:
        pytest.skip(f"no {name} here")
    command = [python, CLIENTS / f"{name}_client.py", address]
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
