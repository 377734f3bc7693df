"""Export of one checkpoint of a run that has finished, was interrupted or still trains."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from jaxglue.data.reads import ReadTask
from jaxglue.data.template import adopt
from jaxglue.files.atomic import atomic_folder, require_empty
from jaxglue.files.json_file import read_json
from jaxglue.hf.adapter import Adapter, load_adapter
from jaxglue.hf.adapter_check import fit_tied
from jaxglue.hf.serving_check import check_serving
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import Params
from jaxglue.objectives.objective import Objective
from jaxglue.objectives.reading import ReadObjective
from jaxglue.settings.spelling import nearest
from jaxglue.training.checkpoint import check_digests, check_meta, quiet_orbax, reason_of
from jaxglue.training.config import TrainConfig, recorded_config
from jaxglue.training.reading import write_reads
from jaxglue.training.result import export_result, require_equal
from jaxglue.training.run import Base
from jaxglue.training.vocabulary import Vocabulary, read_vocabulary, run_stops
from jaxglue.training.workload import read_architecture

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The parts of a run that its exported weights need."""

    base: Base
    lora: LoraConfig | None
    dtype: Any
    objective: Objective
    vocabulary: Vocabulary
    stops: frozenset[int]


def export_checkpoint(run: Path, which: str, output: Path) -> int:
    """Write the adapter, or the whole model, of a checkpoint; return its step.

    Args:
        run: output folder of the run.
        which: a step, "best" for the lowest eval loss, or "last".
        output: absent or empty; it appears complete or not at all.

    Raises:
        ValueError: no such run or checkpoint, or a damaged one.
        OSError: a failed write, such as on a full disk.
    """
    require_empty(output)
    recipe = run / "config.toml"
    if not recipe.is_file():
        raise ValueError(f"{run} holds no run of jaxglue: name the --output of a training run with --run")
    step = choose_step(run / "checkpoints", which)
    trainable = read_trainable(run / "checkpoints" / str(step))
    config = recorded_config(recipe)
    if config.model.train_draft == "with":
        _log.warning("%s: the draft head of a checkpoint is not written, only that of the run's result", run)
    # The run may have been on another machine, where auto is another dtype.
    config = replace(config, model=replace(config.model, dtype=trained_dtype(run / "checkpoints" / str(step))))
    source = _read_run(config)
    kept_base = run / "base"
    with atomic_folder(output) as temporary:
        export_result(source, trainable, temporary, kept_base if kept_base.is_dir() else None)
        if isinstance(source.objective, ReadObjective):
            width, system = source.base.architecture.hidden_size, config.data.system
            is_adapter = source.lora is not None
            write_reads(temporary, source.objective, {}, system=system, hidden_size=width, is_adapter=is_adapter)
        if not source.objective.trains_scores:
            check_serving(temporary, source.vocabulary.tokenizer, source.stops)
        if source.lora is not None:
            written = load_adapter(temporary)
            fitted = fit_tied(written) if source.base.architecture.tie_word_embeddings else written
            require_equal(fitted, source.lora, trainable)
    return step


def choose_step(checkpoints: Path, which: str) -> int:
    """Return the step of a checkpoint: the given one, that with the lowest eval loss, or the last.

    Raises:
        ValueError: there is none; names those that exist.
    """
    steps = sorted(int(path.name) for path in checkpoints.glob("*/") if path.name.isdecimal())
    if not steps:
        raise ValueError(f"{checkpoints} holds no checkpoint")
    losses = {step: loss for step in steps if (loss := _eval_loss(checkpoints / str(step))) is not None}
    listed = ", ".join(map(str, steps))
    if which == "last":
        return steps[-1]
    if which == "best":
        if not losses:
            raise ValueError(f"--checkpoint best: none of the checkpoints {listed} has an eval loss; give a step")
        return min(losses, key=lambda step: (losses[step], step))
    if not which.isdecimal() or int(which) not in steps:
        hint = nearest(which, ("best", "last"))
        raise ValueError(f"--checkpoint {which}: {checkpoints} has {listed}; give one of these, best or last{hint}")
    return int(which)


def read_trainable(folder: Path) -> Params:
    """Read the trained parameters of a checkpoint into host memory, without the optimizer's state.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    folder = folder.absolute()
    try:
        with quiet_orbax():
            meta = read_json(folder / "meta" / "metadata")
            check_meta(meta)
            state = {"trainable": _restore(folder / "state")}
            saved = meta["content"]["arrays"]
            check_digests({name: saved[name] for name in saved if name.startswith("trainable.")}, state)
    except MemoryError:
        raise
    except Exception as error:  # Orbax raises a plain `Exception` for truncated array data
        raise ValueError(f"the checkpoint {folder} is damaged: {reason_of(error)}") from error
    return state["trainable"]


def trained_dtype(folder: Path) -> Literal["bfloat16", "float32"]:
    """Return the compute dtype of the run that saved a checkpoint, which `read_trainable` has read."""
    dtype = read_json(folder / "meta" / "metadata")["content"]["fingerprint"]["dtype"]
    return "float32" if dtype == "float32" else "bfloat16"


def _restore(state: Path) -> Params:
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata: Any = checkpointer.metadata(state).item_metadata
        if metadata is None:
            raise ValueError(f"{state} has no metadata")
        stored = metadata.tree["trainable"]
        shapes = jax.tree.map(lambda item: jax.ShapeDtypeStruct(item.shape, item.dtype, sharding=host), stored)
        item = {"trainable": shapes}
        options = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=options, partial_restore=True)
        return checkpointer.restore(state, args=args)["trainable"]


def _eval_loss(folder: Path) -> float | None:
    path = folder / "metrics" / "metrics"
    try:
        loss = read_json(path).get("eval_loss")
    except (OSError, ValueError):
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _read_run(config: TrainConfig) -> FinishedRun:
    folder = config.model.folder
    architecture, start = read_architecture(config, folder), _start(config)
    architecture = start.adapted(architecture) if start else architecture
    vocabulary = read_vocabulary(folder, config.model.new_tokens, architecture, start, config.model.tokenizer)
    adopt(vocabulary.tokenizer, config.data)
    if isinstance(task := config.objective.task(shared_prompt=True), ReadTask):
        task.adopt(vocabulary.tokenizer)
    return FinishedRun(
        base=Base.of(config, folder, architecture, start),
        lora=config.lora if config.model.method == "lora" else None,
        dtype=config.model.compute_dtype,
        objective=config.objective.make(),
        vocabulary=vocabulary,
        stops=run_stops(vocabulary.tokenizer, folder, config.model.adapter, config.data.stop_tokens),
    )


def _start(config: TrainConfig) -> Adapter | None:
    """Return the adapter that a run trained on from, whose tokenizer it has; one without trained rows may be gone."""
    folder, needed = config.model.adapter, config.lora.modules_to_save or config.lora.trainable_token_indices
    return load_adapter(folder) if folder and (needed or folder.is_dir()) else None
