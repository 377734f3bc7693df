"""Configuration of a run's length, its results and its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.config import (
    Alias,
    CommaSeparated,
    Config,
    NonNegativeInt,
    Overrules,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """How long to train, what to watch, and where the results go."""

    output: Annotated[Path, Alias("output_dir")] = Path("runs/latest")
    """Folder for the adapter, checkpoints, metrics and curve."""
    batch_size: PositiveInt = 1
    """B: packed rows in a micro-batch, over all GPUs."""
    per_device_batch_size: Annotated[PositiveInt, Alias("per_device_train_batch_size", "micro_batch_size")] | None = (
        None
    )
    """Packed rows on each GPU instead; those of a tensor axis share theirs."""
    gradient_accumulation_steps: Annotated[PositiveInt, Alias("accumulation")] = 1
    """Micro-batches in an optimizer step."""
    mesh: str = "auto"
    """How GPUs share the work: sizes of the axes data, fsdp, tensor and expert, such as data=2,fsdp=4; auto takes data
    for adapters on weights that fit each GPU, else fsdp, or expert for mixtures of experts (see docs/sharding.md)."""
    epochs: Annotated[PositiveInt, Alias("num_train_epochs", "num_epochs")] = 1
    """Passes over the data, unless steps is given."""
    steps: Annotated[PositiveInt, Alias("max_steps")] | None = None
    """Optimizer steps; by default those of all epochs."""
    log_every: Annotated[PositiveInt, Alias("logging_steps")] = 10
    """Optimizer steps between lines of metrics."""
    log_to: Annotated[tuple[str, ...], Alias("report_to"), CommaSeparated()] = ("tensorboard",)
    """Trackers of the metrics beside metrics.jsonl, separated by commas: tensorboard, wandb, trackio, mlflow; or
    none."""
    eval_every: Annotated[PositiveInt, Alias("eval_steps")] | None = None
    """Optimizer steps between evaluations, and between readings of expert load; by default one epoch."""
    save_every: Annotated[PositiveInt, Alias("save_steps")] | None = None
    """Optimizer steps between checkpoints; by default as many as between evaluations."""
    keep_checkpoints: Annotated[PositiveInt, Alias("save_total_limit")] = 2
    """Latest checkpoints to keep, besides the best one; at least 2, as the latest may precede a divergence."""
    keep: Annotated[Literal["last", "best", "both"], Alias("load_best_model_at_end", values={True: "best"})] = "last"
    """Weights to export at the end: those of the last step, those with the lowest eval loss, or both (the best in
    `adapter` or `model`, the last in `adapter-last` or `model-last`)."""
    early_stopping: Annotated[PositiveInt, Alias("early_stopping_patience")] | None = None
    """Evaluations in a row without a lower eval loss after which the run ends."""
    on_spike: Literal["nothing", "skip", "rewind"] = "nothing"
    """When loss or gradient norm of a step is a spike: leave out its update; or also return to the last checkpoint's
    weights and go on with the rows after it. The host then waits for each step."""
    spike_sigma: PositiveFloat = 6.0
    """Standard deviations above the mean of the latest 128 steps that make a spike."""
    resume: Annotated[bool, Overrules("overwrite")] = False
    """Continue the run in the output folder; as a flag, also one that a recipe would overwrite."""
    overwrite: Annotated[bool, Alias("overwrite_output_dir")] = False
    """Replace the run in the output folder: its files are deleted once the new run has a checkpoint, others stay."""
    dry_run: bool = False
    """Check everything, print the plan and train nothing."""
    profile: NonNegativeInt = 0
    """Steps to trace with the JAX profiler, after the first three."""
    sample_prompt: tuple[str, ...] = ()
    """Prompts to answer before and after training, and at each evaluation."""
    sample_tokens: PositiveInt = 48
    """Longest answer to a sample prompt, in tokens."""
    compilation_cache: Path | None = Path("~/.cache/jaxglue/xla")
    """Folder on a local disk that keeps compiled programs for the next run, unless JAX_COMPILATION_CACHE_DIR names one;
    none keeps none."""

    def validate(self) -> None:
        """Refuse a malformed mesh and two batch sizes."""
        if self.per_device_batch_size and self.batch_size > 1:
            raise ValueError("--batch-size and --per-device-batch-size are both given: leave one out")
        from jaxglue.sharding.mesh import AUTO, MeshShape

        if self.mesh != AUTO:
            MeshShape.parse(self.mesh)

    @property
    def trackers(self) -> tuple[str, ...]:
        """Return the names in `log_to`, each once."""
        return tuple(dict.fromkeys(name for name in self.log_to if name not in ("", "none")))
