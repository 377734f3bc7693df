"""A model family in a file of the user's: compared with transformers, and by the commands alone, each in a process."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors import safe_open
from selection import repeats_parts_of

from jaxglue.hf.loading import load_model
from jaxglue.models import FAMILIES
from tests.goldens.drawn import unpacked
from tests.models.test_family_goldens import GOLDENS, write_folder
from tests.models.test_parity import assert_parity

PARTS = Path(__file__).with_name("family.py")
SHAPE = {
    **{"model_type": "cohere", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "logit_scale": 0.5},
}
ROWS = [{"text": f"What is {n} plus one? It is {n + 1}."} for n in range(12)]


@pytest.fixture
def cohere():
    """Register the family of `family.py` for one test."""
    with FAMILIES.scope():
        exec(compile(PARTS.read_text(), PARTS.name, "exec"), {"__name__": "family"})
        yield


def test_logits_loss_and_gradients_of_a_family_of_a_file_match_transformers(cohere, tmp_path):
    with safe_open(GOLDENS / "parts" / "cohere.safetensors", "numpy") as file:
        raw, tensors = json.loads(file.metadata()["config"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert_parity(load_model(write_folder(tmp_path, raw), dtype=jnp.float32), unpacked(tensors), nnx.Param)


@pytest.fixture
def start(tmp_path):
    """Start a command with the family's file in a process of its own."""
    processes = []

    def run(command, *arguments) -> subprocess.Popen:
        words = [sys.executable, "-m", "jaxglue", command, *map(str, arguments), "--parts", str(PARTS)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(words, cwd=tmp_path, text=True, **pipes))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def finish(start):
    def run(*arguments) -> str:
        process = start(*arguments)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output

    return run


def served_answer(port: int, process: subprocess.Popen) -> str:
    """Return the server's greedy answer once it listens."""
    body = {"model": "exported", "prompt": "What is 3", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    while process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)["choices"][0]["text"]
        except OSError:
            time.sleep(0.1)
    raise AssertionError(process.communicate()[0])


@repeats_parts_of("test_logits_loss_and_gradients_of_a_family_of_a_file_match_transformers")
def test_commands_train_resume_export_generate_and_serve_a_family_of_a_file(
    cohere, start, finish, make_tokenizer, write_jsonl, tmp_path
):
    model = tmp_path / "model"
    make_tokenizer().save_pretrained(model)
    write_folder(model, SHAPE)
    train = [
        *("train", "--model", model, "--data", write_jsonl(ROWS), "--seq-len", 64, "--rank", 4, "--dtype", "float32"),
        *("--cache-dir", tmp_path / "cache", "--workers", 1, "--steps", 12, "--save-every", 1, "--log-to", "none"),
    ]
    finish(*train, "--output", "whole")
    killed = start(*train, "--output", "killed")
    while killed.poll() is None and not (tmp_path / "killed/checkpoints/2").is_dir():
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert "resumed from step" in finish(*train, "--output", "killed", "--resume")
    adapters = [tmp_path / run / "adapter/adapter_model.safetensors" for run in ("whole", "killed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()

    finish("export", "--adapter", "killed/adapter", "--output", "exported")
    options = ("--prompt", "What is 3", "--raw", "--max-tokens", 4, "--temperature", 0)
    answer = finish("generate", "--model", "exported", *options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = served_answer(port, start("serve", "--model", "exported", "--port", port))
    assert text and repr(text)[1:-1].strip() in answer  # which shows control characters as they are written
