"""The card of a model on the Hugging Face hub: its README.md, from the run that trained it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxglue.files.json_file import read_json
from jaxglue.hf.hub import BaseReference
from jaxglue.objectives.objective import OBJECTIVES
from jaxglue.settings.recipe import read_tables

CURVE = "loss.png"
"""The loss curve in a run's folder, and beside the card."""
_HUB_DATA = "hf:"
_SETTINGS = (
    ("model", ("method", "quantize", "matmul", "dtype")),
    ("lora", ("rank", "alpha", "dropout", "targets")),
    ("data", ("seq_len", "loss_on", "seed")),
    ("optimizer", ("learning_rate", "schedule", "weight_decay")),
    ("run", ("batch_size", "gradient_accumulation_steps", "documents_per_step", "epochs", "steps")),
    ("objective", ()),
)
"""Keys of a run's configuration that the card shows, by table."""
_RESULTS = ("steps", "first_loss", "last_loss", "best_eval_loss", "best_eval_step")


def model_card(
    name: str,
    base: BaseReference | None,
    run: Path,
    *,
    adapter: bool,
    check: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    gguf: Sequence[str] = (),
) -> str:
    """Return a README.md with front matter: base, prompt format, data, settings and losses.

    Args:
        name: of the repository, owner/name.
        base: of the model; None for one without a known base.
        run: the run's folder; without its config.toml, the card tells the base only.
        adapter: the repository holds an adapter rather than a whole model.
        check: comparison of the files with the trained model, from `export_check.json`.
        prompt: a chat in the model's format.
        gguf: names of the GGUF files that the repository holds instead of safetensors.
    """
    config = _read_toml(run / "config.toml")
    sources = config.get("data", {}).get("data", [])
    data = [str(source) for source in (sources if isinstance(sources, list) else [sources])]
    objective = OBJECTIVES.get(config.get("objective", {}).get("objective"))
    scores = objective is not None and objective.trains_scores
    front = _front_matter(base, data, adapter=adapter, scores=scores, gguf=bool(gguf))
    blocks = [front, f"# {name.partition('/')[2]}\n", _summary(base, adapter, gguf=bool(gguf))]
    if gguf:
        runs = [f"llama-server -hf {name}", f"ollama run hf.co/{name}"]
        commands = [f"llama-server -m BASE.gguf --lora {gguf[0]}"] if adapter else runs
        blocks.append("## Run it\n\n" + "".join(f"    {command}\n" for command in commands))
    if prompt is not None:
        blocks.append("## Prompt format\n\n" + "".join(f"    {line}\n" for line in prompt.splitlines()))
    if data:
        blocks.append("## Data\n\n" + "".join(f"- `{_public(source)}`\n" for source in data))
    if config:
        blocks.append(_table("Settings", ("setting", "value"), _settings(config)))
    if (run / "summary.json").is_file():
        results = read_json(run / "summary.json")
        rows = [(key, results[key]) for key in _RESULTS if results.get(key) is not None]
        blocks.append(_table("Results", ("result", "value"), rows))
    if check:
        blocks.append(_table("Read back", ("files against the trained model", "value"), check.items()))
    if (run / CURVE).is_file():
        blocks.append(f"![Training loss over steps]({CURVE})\n")
    return "\n".join(blocks)


def _front_matter(base: BaseReference | None, data: list[str], *, adapter: bool, scores: bool, gguf: bool) -> str:
    """Return the YAML that the hub reads; JSON's strings and lists are YAML's."""
    fields: dict[str, Any] = {
        **({} if gguf else {"library_name": "peft" if adapter else "transformers"}),
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": ["jaxglue", *(["lora"] if adapter else []), *(["gguf"] if gguf else [])],
    }
    if base and base.revision:
        fields |= {"base_model": base.name, "base_model_relation": "adapter" if adapter else "finetune"}
    if hub := [_hub_name(source) for source in data if source.startswith(_HUB_DATA)]:
        fields["datasets"] = hub
    return "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items()) + "---\n"


def _summary(base: BaseReference | None, adapter: bool, *, gguf: bool) -> str:
    what = ("A LoRA adapter" if adapter else "A model") + (" in GGUF, for llama.cpp and Ollama," if gguf else "")
    if base is None:
        return f"{what} written by jaxglue.\n"
    if base.revision:
        return f"{what} fine-tuned with jaxglue from [{base.name}](https://huggingface.co/{base.name}/tree/{base.revision}).\n"
    return f"{what} fine-tuned with jaxglue from {Path(base.name).name}.\n"


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for table, keys in _SETTINGS:
        if table != "lora" or config.get("model", {}).get("method") == "lora":
            values = config.get(table, {})
            yield from ((key, values[key]) for key in keys if values.get(key, "none") != "none")


def _table(title: str, header: tuple[str, str], rows: Any) -> str:
    lines = [header, ("---", "---"), *((key.replace("_", " "), _cell(value)) for key, value in rows)]
    return f"## {title}\n\n" + "".join(f"| {key} | {value} |\n" for key, value in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _hub_name(source: str) -> str:
    return source.removeprefix(_HUB_DATA).partition("?")[0].partition(":")[0]


def _public(source: str) -> str:
    """Return a data source as the card names it: a hub name, or a file's name without its folders."""
    return source if source.startswith(_HUB_DATA) else Path(source).name


def _read_toml(path: Path) -> dict[str, Any]:
    tables = read_tables(path) if path.is_file() else {}
    if wrong := next((name for name, _ in _SETTINGS if not isinstance(tables.get(name, {}), dict)), None):
        raise ValueError(f"{path}: {wrong}: expected the table [{wrong}]")
    return tables
