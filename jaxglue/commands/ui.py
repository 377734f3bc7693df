"""A page about runs: `jaxglue ui runs/first runs/second`."""

import webbrowser
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jaxglue.commands.configs import EstimateConfig, UiConfig
from jaxglue.data.batch import Batch
from jaxglue.data.iterator import BatchIterator
from jaxglue.data.prepare import prepare_data
from jaxglue.data.progress import DataProgress
from jaxglue.planner.gpus import GIB
from jaxglue.settings.recipe import from_settings, load_config
from jaxglue.terminal.lines import echo
from jaxglue.training.config import TrainConfig
from jaxglue.ui.page import static_page
from jaxglue.ui.run_files import read_run
from jaxglue.ui.server import PageServer

_ROWS, _PLANS = 3, 8
_GPU, _LARGER_GPU, _MOST = "H200", "B200", 130
"""GPUs whose rates predict memory sizes, and the GiB from which the larger one does."""
_LONGEST = 400
"""Tokens of an answer in the page's chat."""


def main(config: UiConfig) -> None:
    """Serve the page until Ctrl-C, or write it as one file.

    Raises:
        ValueError: a folder holds no run.
    """
    if config.output is not None:
        text = static_page([read_run(folder).as_json() for folder in config.runs])
        config.output.write_text(text, encoding="utf-8")
        echo(f"wrote {config.output}")
        return
    server = PageServer(config.runs, config.port, {"rows": rows, "estimate": estimate, "answer": _Chat().answer})
    echo(f"{', '.join(map(str, config.runs))}: {server.address}")
    if config.open:
        webbrowser.open(server.address)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def rows(folder: Path, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first packed rows of a run: of each document its tokens' texts, and whether they have loss."""
    from jaxglue.data.template import adopt
    from jaxglue.hf.hub import model_path
    from jaxglue.hf.serving import load_own_tokenizer

    config = load_config(TrainConfig, folder / "config.toml")
    if config.objective.kind.reads:
        raise ValueError(f"--objective {config.objective.objective}: its rows have parts, which are not drawn")
    if config.objective.kind.forks:
        raise ValueError(f"--objective {config.objective.objective}: its rows hold several answers: see Rollouts")
    base = model_path(config.model.model, config.model.revision, weights=False)
    tokenizer = load_own_tokenizer(config.model.tokenizer or base, config.model.adapter)
    adopt(tokenizer, config.data)
    data = prepare_data(config.data, tokenizer, progress=DataProgress()).train
    sizes = {"seq_len": config.data.row_tokens, "batch_size": 1, "process_index": 0, "process_count": 1}
    steps = BatchIterator(data, seed=config.data.seed, epochs=1, gradient_accumulation_steps=1, **sizes)
    found = [list(_documents(step.micro_batches[0], tokenizer)) for step in islice(steps, _ROWS)]
    return {"rows": found}


def _documents(batch: Batch, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the documents of a row: texts of runs of tokens with and without loss."""
    tokens, segments = np.asarray(batch.tokens)[0], np.asarray(batch.segments.segment_ids)[0]
    # The loss of a target stands at the token before it.
    trained = np.concatenate([[False], np.asarray(batch.loss_weights)[0][:-1] > 0])
    for segment in range(1, int(segments.max()) + 1):
        inside = np.flatnonzero(segments == segment)
        bounds = np.flatnonzero(np.diff(trained[inside], prepend=~trained[inside][:1], append=~trained[inside][-1:]))
        parts = [
            (str(tokenizer.decode(tokens[inside[first:last]])), bool(trained[inside[first]]))
            for first, last in pairwise(bounds)
        ]
        yield {"tokens": len(inside), "targets": int(trained[inside].sum()), "parts": parts}


def estimate(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plans of a run within another GPU memory, fastest first."""
    from jaxglue.commands.estimate import make_planner, worth_showing

    memory = request.get("memory")
    if not isinstance(memory, int | float) or not 1 <= memory <= 1024:
        raise ValueError("memory: expected GiB from 1 to 1024")
    gpu = _GPU if memory < _MOST else _LARGER_GPU
    config = from_settings(EstimateConfig, {"gpu": gpu, "memory_limit": float(memory)}, folder / "config.toml")
    planner = make_planner(config)
    host = planner.gpu.host_memory(config.host_memory_gib * GIB)
    plans = sorted(worth_showing(planner.plans(host)), key=lambda plan: (not planner.fits(plan, host), plan.seconds))
    return {
        "plans": [
            {
                "policy": str(plan).removeprefix("--remat ").strip("'"),
                "milliseconds": round(plan.seconds * 1e3, 1),
                "gib": round(plan.device_bytes / GIB, 1),
                "fits": planner.fits(plan, host),
            }
            for plan in plans[:_PLANS]
        ]
    }


class _Chat:
    """Answers by a run's model, with and without its adapter; one of them is loaded at a time."""

    def __init__(self) -> None:
        self._loaded: tuple[Path, bool] | None = None
        self._assistant: Any = None
        self._lock = Lock()

    def answer(self, folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a message."""
        from jaxglue.generation.assistant import Assistant
        from jaxglue.generation.config import AssistantConfig, SamplingConfig
        from jaxglue.generation.prompts import encode_messages

        message, adapted = request.get("message"), bool(request.get("adapted"))
        if not isinstance(message, str) or not message.strip():
            raise ValueError("message: expected a text")
        with self._lock:
            if self._loaded != (folder, adapted):
                self._loaded = self._assistant = None
                self._assistant = Assistant(AssistantConfig(**_model_of(folder, adapted=adapted)), stays=True)
                self._loaded = (folder, adapted)
            tokens = encode_messages(self._assistant.tokenizer, [{"role": "user", "content": message}])
            pieces = self._assistant.answer(tokens, SamplingConfig(max_tokens=_LONGEST, temperature=0.0))
            return {"answer": "".join(pieces)}


def _model_of(folder: Path, *, adapted: bool) -> dict[str, Any]:
    """Return the settings of the model that a run left, or of the base that it began from."""
    if not (folder / "adapter").is_dir():
        return {"model": folder / "model"}
    if adapted:
        return {"adapter": folder / "adapter"}
    if (folder / "base").is_dir():
        return {"model": folder / "base"}
    config = load_config(TrainConfig, folder / "config.toml")
    return {"model": config.model.model, "revision": config.model.revision}
