"""Functions of the package root that take settings by name, as the command's flags do."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxglue.commands.configs import EstimateConfig, ExportConfig
from jaxglue.commands.estimate import make_planner
from jaxglue.commands.export import main as write_exports
from jaxglue.data.config import NO_COLUMNS, Columns, DataConfig
from jaxglue.data.memory import holds_rows, name_sources, with_named_tokenizer
from jaxglue.generation import assistant
from jaxglue.generation.config import AssistantConfig
from jaxglue.ops.choices import Quantize
from jaxglue.parts import load_kinds
from jaxglue.planner import planner
from jaxglue.planner.gpus import GIB
from jaxglue.planner.plan import Plan
from jaxglue.planner.workload import Workload
from jaxglue.rl.given import named_functions
from jaxglue.serve import answers, measured, scores
from jaxglue.serve.config import EvaluateConfig, GenerateConfig, ScoreConfig
from jaxglue.serve.harness import run_tasks
from jaxglue.settings.recipe import from_settings
from jaxglue.training import train as training
from jaxglue.training.callbacks import Callback, Metrics
from jaxglue.training.config import TrainConfig
from jaxglue.training.optimizer_objects import named_optimizer
from jaxglue.training.report import RunSummary

if TYPE_CHECKING:
    from jaxglue.models.decoder import CausalLM


def train(
    config: TrainConfig | Mapping[str, Any] | None = None,
    *,
    recipe: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    compute_metrics: Metrics | None = None,
    columns: Columns = NO_COLUMNS,
    **settings: Any,
) -> RunSummary | None:
    """Train, and write adapter or model, checkpoints, metrics and curve to the output folder.

    Args:
        config: the run, as a `TrainConfig` or a dictionary of settings.
        recipe: file or shipped name, as in `--recipe`; settings win over it.
        callbacks: receive the run's events.
        compute_metrics: function of the `Predictions` on held-out data to numbers by name, as TRL's.
        columns: of numbers in rows that it reads, each with the value of rows without it.
        settings: by the names of the command's flags: `model`, `data`, `steps`, `lora_r`, … `data` and `eval_data` may
            be rows in memory: dictionaries in a list or generator, a table of pandas or pyarrow, a data set of
            `datasets`; `tokenizer` one of transformers, `optimizer` a transformation of optax, which then has its own
            learning rate, decay and clipping, and `reward` and `environment` functions, which run in this process.

    Returns:
        the results; None after a dry run or an interruption.

    Raises:
        ValueError: a bad setting or bad input, before the accelerator is used.
    """
    with named_optimizer(settings) as settings, named_functions(settings) as settings:
        configured = _configured(TrainConfig, config, settings, recipe)
        return training.train(configured, callbacks=callbacks, compute_metrics=compute_metrics, columns=columns)


def generate(
    config: GenerateConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each prompt with its answer, streamed in pieces.

    Args:
        config: model, prompts and sampling.
        settings: instead, by the names of the command's flags: `model`, `adapter`, `prompt`, `max_tokens`, …

    Raises:
        ValueError: bad settings, folders, tensors, tokenizer or prompts.
    """
    return answers.generate(_configured(GenerateConfig, config, settings))


def score(
    config: ScoreConfig | Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[dict[str, Any], tuple[float, ...]]]:
    """Yield each row of data with its score by a reward model, or the scores of its two answers.

    Args:
        config: model and data.
        settings: instead, by the names of the command's flags: `model`, `adapter`, `data`, … `data` may be rows in
            memory, as of `train`.

    Raises:
        ValueError: bad settings, folders, tensors, tokenizer or data.
    """
    found = scores.score_rows(_configured(ScoreConfig, config, settings))
    return ((row.value, scores) for row, scores in found)


def evaluate(config: EvaluateConfig | Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Run tasks of lm-evaluation-harness on a model; return the harness's results.

    With `data`, measure a model that answers in one pass on these rows, and return the measures by name.

    Args:
        config: model and tasks, or data.
        settings: instead, by the names of the command's flags: `model`, `adapter`, `tasks`, `limit`, …

    Raises:
        ValueError: bad settings, folders or tasks.
    """
    settled = _configured(EvaluateConfig, config, settings)
    return measured.measure_rows(settled).values if settled.data else run_tasks(settled)


def export(config: ExportConfig | Mapping[str, Any] | None = None, **settings: Any) -> Path | None:
    """Merge an adapter, quantize a folder, write a GGUF file or a checkpoint's weights; return the folder written.

    Args:
        config: what to write.
        settings: instead, by the names of the command's flags: `adapter`, `base`, `quantize`, `gguf`, `output`, …

    Raises:
        ValueError: bad settings, folders or tensors; nothing is written then.
    """
    chosen = _configured(ExportConfig, config, settings)
    write_exports(chosen)
    return chosen.output


def load_model(
    model: str | Path | None = None,
    *,
    adapter: str | Path | None = None,
    revision: str | None = None,
    dtype: Any = None,
    quantize: Quantize = "none",
) -> "CausalLM":
    """Load a model, which maps tokens to logits, with an adapter if one is named.

    Args:
        model: folder, or `owner/name` on the hub; by default the adapter's base.
        adapter: a PEFT folder.
        revision: branch, tag or commit of a model on the hub.
        dtype: of weights and activations; by default bfloat16.
        quantize: storage of the decoder layers' linear layers.

    Raises:
        ValueError: a bad folder, an unsupported config.json, mismatched tensors, or an adapter of another base.
    """
    import jax.numpy as jnp

    paths: dict[str, Any] = {
        name: Path(path) for name, path in (("model", model), ("adapter", adapter)) if path is not None
    }
    config = AssistantConfig(**paths, revision=revision, quantize=quantize)
    return assistant.load_assistant(config, config.folder, jnp.bfloat16 if dtype is None else dtype)


def plan(model: str | Path | Workload, gpu: str, *, recipe: str | Path | None = None, **settings: Any) -> Plan:
    """Predict time and memory of a training step on a GPU, with the fastest policy that fits.

    Args:
        model: a model folder, of which config.json is enough, or a `Workload`.
        gpu: a GPU's name, such as "4090"; it need not be present.
        recipe: of a training run; settings win over it.
        settings: by the names of `jaxglue estimate`'s flags: `seq_len`, `method`, `quantize`, `remat`, …; with a
            `Workload`, the options of `jaxglue.planner.planner.plan`.

    Raises:
        ValueError: a bad setting, an unknown model or GPU, or nothing fits.
    """
    if isinstance(model, Workload):
        return planner.plan(model, gpu, **settings)
    load_kinds(settings.get("parts", ()))
    config = from_settings(EstimateConfig, {"model": str(model), "gpu": gpu, **settings}, recipe)
    planned, weights = make_planner(config), config.model.weights
    host_memory = planned.gpu.host_memory(config.host_memory_gib * GIB)
    return planned.resolve(config.model.remat, weights=weights, host_memory=host_memory)


def _configured[C](cls: type[C], config: Any, settings: Mapping[str, Any], recipe: str | Path | None = None) -> C:
    if isinstance(config, cls):
        if recipe is not None or settings:
            names = ", ".join([*(["recipe"] if recipe is not None else []), *settings])
            raise ValueError(f"a configuration is complete, and {names} would be ignored: use dataclasses.replace")
        return config
    if config is None or isinstance(config, Mapping):
        return _from_settings(cls, {**(config or {}), **settings}, recipe)
    raise ValueError(
        f"config: expected a {cls.__name__} or a dictionary of settings, got {config!r:.100}; name each setting, as in "
        "model=…"
    )


def _from_settings[C](cls: type[C], settings: dict[str, Any], recipe: str | Path | None) -> C:
    """Build a configuration; rows in memory are written once all other settings are known to be good."""
    load_kinds(settings.get("parts", ()))
    settings = with_named_tokenizer(settings)
    rows = {name: settings[name] for name in ("data", "eval_data", "eval_dataset") if holds_rows(settings.get(name))}
    config = from_settings(cls, settings | {name: (f"{name} in memory",) for name in rows}, recipe)
    if not rows:
        return config
    cache = config.data.cache_dir if isinstance(config, TrainConfig) else DataConfig.cache_dir
    names = {name: name_sources(value, Path(cache) / "rows") for name, value in rows.items()}
    return from_settings(cls, settings | names, recipe)
