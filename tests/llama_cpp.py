"""Runs llama.cpp (the package xllamacpp) on a GGUF file in a process of its own, whose crash a test survives.

A request is JSON: `model`, optionally `lora`, `mmproj` and a number of `drafts` by the file's own head, and lists
`prompts` (tokens), `chats` (messages), `texts`, `bodies` of chat completions and of `decisions`, and texts to `embed`;
the answer holds the tokens that follow each prompt, each chat as rendered with its tokens and answer, each text's
tokens and vector, and replies.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path


def ask(**request) -> dict:
    """Return llama.cpp's answer to a request."""
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=json.dumps(request, default=str), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(Path(done.stdout.strip().splitlines()[-1]).read_text())


def _post(address: str, path: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    call = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call) as answer:
        return json.load(answer)


def _answer(request: dict) -> dict:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 512, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = 2
    if "lora" in request:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["lora"], 1.0)]
    if "mmproj" in request:
        params.mmproj.path, params.mmproj_use_gpu = request["mmproj"], False
    params.embedding = "embed" in request
    if count := request.get("drafts"):
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = count
    server = xllamacpp.Server(params)
    address = server.listening_address

    def complete(prompt) -> dict:
        greedy = {
            "temperature": 0,
            "n_predict": request.get("tokens", 12),
            "return_tokens": True,
            "top_k": 1,
            "n_probs": request.get("probs", 0),
        }
        return _post(
            address,
            "/completion",
            {"prompt": prompt, "cache_prompt": False, "logit_bias": request.get("bias", []), **greedy},
        )

    def chat(messages) -> dict:
        text = _post(address, "/apply-template", {"messages": messages})["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        return {"text": text, "tokens": _post(address, "/tokenize", body)["tokens"]}

    return {
        "prompts": [complete(prompt) for prompt in request.get("prompts", [])],
        "chats": [chat(messages) for messages in request.get("chats", [])],
        "replies": [_post(address, "/v1/chat/completions", body) for body in request.get("bodies", [])],
        "decisions": [_post(address, "/v1/systemone", body) for body in request.get("decisions", [])],
        "vectors": [
            _post(address, "/v1/embeddings", {"input": text})["data"][0]["embedding"]
            for text in request.get("embed", [])
        ],
        "texts": [_post(address, "/tokenize", {"content": text})["tokens"] for text in request.get("texts", [])],
    }


if __name__ == "__main__":
    request = json.load(sys.stdin)
    path = Path(request["model"]).with_name(f"answer-{os.getpid()}.json")
    path.write_text(json.dumps(_answer(request)))
    print(path, flush=True)
    os._exit(0)  # the server's threads would wait for a while
