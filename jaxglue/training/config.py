"""Configuration of a training run: every field is a flag and a key of a recipe."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jaxglue.data.config import DataConfig
from jaxglue.distributed import DistributedConfig
from jaxglue.hf.hub import base_reference, is_hub_id, model_path
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.objective import ObjectiveConfig, frozen_vocabulary
from jaxglue.ops.choices import Attention, Matmul, Quantize, ServeAs, Storage, choose_storage
from jaxglue.parts import PartsConfig, require_parts
from jaxglue.rl.config import RolloutConfig
from jaxglue.settings.config import (
    Alias,
    CommaSeparated,
    Config,
    Excludes,
    HelpLayout,
    Instead,
    NonNegativeFloat,
    NonNegativeInt,
    Overrules,
    PositiveFloat,
    PositiveInt,
    Range,
    Requires,
    is_jinja,
    refuse_contradictions,
)
from jaxglue.settings.recipe import load_config, read_tables
from jaxglue.training.optimizer import OptimizerConfig

if TYPE_CHECKING:
    import jax.numpy as jnp

    from jaxglue.models.context import RouterLosses


def _is_full(method: str) -> bool:
    return method == "full"


def _splits_rows(mesh: str) -> bool:
    from jaxglue.sharding.mesh import AUTO, MeshShape

    return mesh != AUTO and MeshShape.parse(mesh).tensor > 1


_FROZEN: dict[str, Any] = {
    "reason": "it is for frozen weights, and all train",
    "when": _is_full,
    "remedy": "use --method lora, or leave it out",
}


_OF_FP8 = Excludes(
    "matmul", "it is a part of --matmul fp8", lambda matmul: matmul != "fp8", remedy="give both, or neither"
)
_BY_EVAL_LOSS = Requires(("eval_data", "eval_fraction"), "it goes by the eval loss")
_EACH_TOKEN = "each generated token reads them all"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The model to start from, and how it runs."""

    model: Annotated[str, Alias("base_model", "model_name_or_path", "model_name")]
    """A Hugging Face model folder with config.json, tokenizer and safetensors, or owner/name on the hub."""
    revision: Annotated[str | None, Alias("model_revision", "revision_of_model")] = None
    """Branch, tag or commit of a model on the hub; a run records the commit."""
    random_weights: bool = False
    """Start from random weights, so that the folder needs no safetensors; up to 1 GiB of them go to base/ beside the
    adapter."""
    method: Annotated[
        Literal["lora", "full"],
        Alias("finetuning_type"),
        Alias("use_peft", values={True: "lora"}),
        Alias("full_finetuning", values={True: "full"}),
        Instead(
            qlora="give --method lora --quantize nf4",
            freeze="give --method lora: --layers adapts some layers, --modules-to-save trains embed_tokens and lm_head",
            oft="give --method lora, with --dora or --rslora if you like",
        ),
        Excludes("weights", given=lambda place: place not in ("device", "auto"), **_FROZEN),
        Excludes("embeddings", given=lambda place: place == "host", **_FROZEN),
        Excludes("quantize", given=lambda storage: storage != "none", **_FROZEN),
        Excludes("serve_as", **_FROZEN),
        Excludes("fp8_head", **_FROZEN),
        *(
            Excludes(name, "it is for adapters, and all weights train", when=_is_full)
            for name in ("lora_plus_ratio", "modules_to_save", "trainable_token_indices", "dora")
        ),
    ] = "lora"
    """Train adapters on frozen weights, or all weights."""
    adapter: Annotated[
        Path | None,
        Alias("lora_model_dir", "adapter_name_or_path"),
        Excludes("new_tokens", "it has rows of its own vocabulary", remedy="merge the adapter first (jaxglue export)"),
    ] = None
    """Train on from this PEFT adapter, with its rank, alpha and targets."""
    tokenizer: Annotated[Path | None, Alias("tokenizer_config", "tokenizer_name_or_path")] = None
    """Folder of another tokenizer with its chat template, for the same vocabulary; by default the model's."""
    new_tokens: Path | None = None
    """Text file with a token a line to add to the vocabulary, each with the mean of the others' rows; with --method
    lora only the new rows train, unless --modules-to-save names embed_tokens and lm_head."""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Alias("torch_dtype"),
        Alias("bf16", values={True: "bfloat16", "full": "bfloat16", "auto": "auto"}),
        Instead(float16="its range is too small for training; use bfloat16"),
    ] = "auto"
    """Of activations, matmuls and frozen weights; auto is bfloat16 on GPUs, float32 on CPUs. Trainable weights are
    always float32. Products of float32 are not rounded to TF32, unless JAX_DEFAULT_MATMUL_PRECISION says so."""
    attention: Attention = "auto"
    """Attention backend; auto picks by GPU and shape, and reports its choice."""
    remat: str = "auto"
    """Remat policy of the layers: none (recompute nothing), dots, full (recompute everything), offload, a mix such as
    "dots; offload:gate,up", or auto, the fastest that fits the GPU (see docs/memory.md)."""
    tile: PositiveInt | None = None
    """Tokens that pass through a layer at a time, apart from attention; by default all, or as many as fit where whole
    rows do not."""
    layers_per_program: PositiveInt | None = None
    """Consecutive layers dispatched as one program, which with all of them has embedding and head too; by default one,
    or all where dispatch takes longer than a small model's layers and everything stays on one GPU."""
    memory_limit: PositiveFloat | None = None
    """GPU memory that the run may take, GiB, and auto plans with; by default all of JAX's share."""
    weights: str = "auto"
    """Place of the layers' frozen weights: device; host, streamed layer by layer from its memory; mapped, read from
    their files; or several, such as "20 x device & 12 x host". auto streams as few layers as memory allows, none where
    the run samples text, each token of which reads them all."""
    embeddings: Annotated[
        Literal["device", "host", "auto"],
        Excludes(
            "modules_to_save",
            "a table in host memory is frozen",
            lambda modules: "embed_tokens" in modules,
            when=lambda place: place == "host",
        ),
    ] = "device"
    """Place of frozen embedding table and output projection: on the GPU, or in host memory, from which each step reads
    its tokens' rows and copies the projection. A table tied to the projection stays on the GPU, and of Gemma 4 only the
    one of each layer's embeddings moves. auto moves them where layers' weights would be streamed, if this is predicted
    to be faster."""
    expand_experts: bool = False
    """Expand MXFP4 experts on loading: four times their memory, faster steps."""
    quantize: Annotated[
        Quantize,
        Alias("quantise"),
        Alias("load_in_4bit", values={True: "nf4"}),
        Alias("load_in_8bit", values={True: "int8"}),
        Alias("load_in_16bit", values={True: "none"}),
        Alias("quantization_bit", values={"4": "nf4", "8": "int8"}),
    ] = "none"
    """Quantize the frozen linear layers of the decoder layers to NF4 (QLoRA, 0.52 bytes a weight) or int8 (1 byte),
    with bitsandbytes' values. Already-quantized folders are detected."""
    serve_as: Annotated[ServeAs, Excludes("dropout", "adapters are merged as they are")] = "none"
    """Train the adapter for a model that is served with it merged and rounded to NVFP4 (vLLM), NF4, MXFP4 (GPT-OSS's
    experts), or Q4_K_M (llama.cpp): products are with the merge on that format's grid, as jaxglue export writes it. A
    plain merge into four bits loses much of what a small adapter learned. A folder in the format already stays in four
    bits."""
    matmul: Matmul = "bf16"
    """Products of the decoder layers' linear layers: in the activations' dtype, or in FP8 (about twice the rate, and 1
    byte a frozen weight; Ada, Hopper and newer GPUs). With --method full, weights and their gradients stay wider."""
    fp8_max_error: PositiveFloat = 0.2
    """Relative error of a layer's output or of the head's gradient, measured on the first batch, above which
    --matmul fp8 multiplies there in the activations' dtype; says so."""
    fp8_head: Annotated[
        bool, _OF_FP8, *frozen_vocabulary("the head must be frozen: train no embeddings, head and new tokens")
    ] = False
    """With --matmul fp8, multiply the frozen output projection in FP8 too."""
    fp8_experts: Annotated[bool, _OF_FP8] = False
    """With --matmul fp8, multiply experts in MXFP4 in FP8 too, which holds their values."""
    train_vision: Annotated[
        Literal["none", "projector", "all"],
        Alias("finetune_vision_layers", values={True: "all", False: "none"}),
        Alias("freeze_vision_tower", "freeze_vit", values={True: "none", False: "all"}),
    ] = "none"
    """Parts of a vision tower that train beside the text: none, its projector as a whole, or all: adapters on tower and
    projector, or with --method full their weights."""
    image_features: Literal["auto", "disk", "off"] = "auto"
    """Run a frozen vision tower once for each image, and keep the features in the host's memory, and in --cache-dir
    where they would fill half of it; disk keeps them there for later runs too, off runs the tower in each step."""
    neftune_alpha: Annotated[NonNegativeFloat, Alias("neftune_noise_alpha", "noisy_embedding_alpha")] = 0.0
    """Train with uniform noise within ± alpha / √(length · hidden size) on each document's embeddings (NEFTune, arXiv
    2310.05914); 5 is usual, 0 adds none."""
    train_draft: Annotated[
        Literal["off", "with", "after"],
        *(
            Excludes(name, f"the draft head reads {what}", given)
            for name, what, given in (
                ("embeddings", "the embedding in every step", lambda place: place != "device"),
                ("new_tokens", "the model's vocabulary as its files hold it", None),
                ("random_weights", "weights of the model's folder", None),
                ("update_in_backward", "gradients after the backward pass", None),
            )
        ),
    ] = "off"
    """Train the folder's draft head too, by which servers decode faster (multi-token prediction, MTP): in the same
    steps, or in as many after them. The model's own training stays what it is; the head goes to the result, under its
    published names."""
    draft_method: Literal["lora", "full"] | None = None
    """Train adapters on the draft head, merged when it is written, or all its weights; by default as --method says."""
    draft_learning_rate: PositiveFloat | None = None
    """Learning rate of the draft head; by default the model's, or its own method's: adapters 2e-4, all weights 5e-5."""
    router_balance_loss: Annotated[NonNegativeFloat, Alias("router_aux_loss_coef", "moe_aux_loss_coef")] = 0.0
    """Weight of the routers' load-balancing loss; 0, usual in fine-tuning, omits it. The loss shown excludes it."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the routers' z-loss, which keeps their logits small; the loss shown excludes it too."""

    def validate(self) -> None:
        """Refuse an unknown remat policy, and places and storages that do not exist."""
        from jaxglue.engine.policy import check_remat
        from jaxglue.engine.residency import check_weights

        check_remat(self.remat)
        check_weights(self.weights)
        choose_storage(self.quantize, self.matmul, self.serve_as)

    @property
    def folder(self) -> Path:
        """Return the model's folder, downloaded if it is on the hub."""
        return model_path(self.model, self.revision, weights=not self.random_weights)

    @property
    def pinned(self) -> "ModelConfig":
        """Return the configuration with the commit of a model on the hub."""
        return replace(self, revision=base_reference(self.folder).revision) if is_hub_id(self.model) else self

    @property
    def storage(self) -> Storage:
        """Return the storage of the decoder layers' linear layers."""
        return choose_storage(self.quantize, self.matmul, self.serve_as, trains=self.method == "full")

    @property
    def fp8_products(self) -> dict[str, bool]:
        """Return whether output projection and experts are multiplied in FP8, as `DecoderConfig.quantized` takes it."""
        return {"fp8_head": self.fp8_head, "fp8_experts": self.fp8_experts}

    @property
    def router_losses(self) -> "RouterLosses | None":
        """Return the weights of the routers' auxiliary losses; None when all are 0."""
        from jaxglue.models.context import RouterLosses

        losses = RouterLosses(balance=self.router_balance_loss, z=self.router_z_loss)
        return losses if any(losses) else None

    @property
    def compute_dtype(self) -> "jnp.dtype":
        """Return the dtype chosen by `dtype` on this machine."""
        import jax
        import jax.numpy as jnp

        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Length, measurements and output folder of a run."""

    output: Annotated[Path, Alias("output_dir")] = Path("runs/latest")
    """Folder for the adapter, checkpoints, metrics and curve."""
    batch_size: PositiveInt = 1
    """B: packed rows in a micro-batch, over all GPUs."""
    per_device_batch_size: (
        Annotated[
            PositiveInt,
            Alias("per_device_train_batch_size", "micro_batch_size"),
            Excludes("batch_size", "both are sizes of a micro-batch", remedy="leave one out"),
        ]
        | None
    ) = None
    """Packed rows on each GPU instead; those of a tensor axis share theirs."""
    gradient_accumulation_steps: Annotated[PositiveInt, Alias("accumulation")] = 1
    """Micro-batches in an optimizer step."""
    documents_per_step: (
        Annotated[
            PositiveInt,
            Excludes("gradient_accumulation_steps", "a step takes the micro-batches that its documents need"),
        ]
        | None
    ) = None
    """Documents in an optimizer step instead, or pairs of answers, over all GPUs: packed by themselves into as many
    micro-batches as they need, as for recipes of programs that do not pack."""
    mesh: Annotated[
        str,
        Excludes("dora", "it needs whole rows of the weights", when=_splits_rows, remedy="use a --mesh without tensor"),
    ] = "auto"
    """How GPUs share the work: sizes of the axes data, fsdp, expert, context and tensor, such as data=2,fsdp=4; auto
    takes data for adapters on weights that fit each GPU, else fsdp, or expert for mixtures of experts, and context for
    rows that are too long or too few (see docs/sharding.md)."""
    epochs: Annotated[float, Range(gt=0, le=10_000), Alias("num_train_epochs", "num_epochs")] = 1.0
    """Passes over the data, unless steps is given; a part of one, such as 0.5, takes that share of its steps."""
    steps: Annotated[int, Range(ge=1, lt=2**31), Alias("max_steps")] | None = None
    """Optimizer steps; by default those of all epochs."""
    log_every: Annotated[PositiveInt, Alias("logging_steps")] = 10
    """Optimizer steps between lines of metrics."""
    log_to: Annotated[tuple[str, ...], Alias("report_to"), CommaSeparated()] = ("tensorboard",)
    """Trackers of the metrics beside metrics.jsonl, separated by commas: tensorboard, wandb, trackio, mlflow; or
    none."""
    log_project: Annotated[str, Alias("wandb_project", "project", "mlflow_experiment_name")] | None = None
    """Project, or experiment, of the run in the trackers; by default their own variables (WANDB_PROJECT) or jaxglue."""
    log_name: Annotated[str, Alias("wandb_name", "run_name")] | None = None
    """Name of the run in the trackers; by default that of the output folder."""
    eval_every: Annotated[PositiveInt, Alias("eval_steps")] | None = None
    """Optimizer steps between evaluations, and between readings of expert load; by default one epoch."""
    save_every: Annotated[PositiveInt, Alias("save_steps")] | None = None
    """Optimizer steps between checkpoints; by default as many as between evaluations."""
    keep_checkpoints: Annotated[PositiveInt, Alias("save_total_limit")] = 2
    """Latest checkpoints to keep, besides the best one; at least 2, as the latest may precede a divergence."""
    keep: Annotated[
        Literal["last", "best", "both"],
        Alias("load_best_model_at_end", values={True: "best"}),
        _BY_EVAL_LOSS,
    ] = "last"
    """Weights to export at the end: those of the last step, those with the lowest eval loss, or both (the best in
    `adapter` or `model`, the last in `adapter-last` or `model-last`)."""
    early_stopping: (
        Annotated[PositiveInt, Alias("early_stopping_patience", "early_stopping_steps"), _BY_EVAL_LOSS] | None
    ) = None
    """Evaluations in a row without a lower eval loss after which the run ends."""
    on_spike: Annotated[
        Literal["nothing", "skip", "rewind"],
        Excludes("update_in_backward", "it updates before the gradient norm is known, by which a spike is left out"),
    ] = "nothing"
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
    explain: bool = False
    """Say of each automatic choice what binds it, the runner-up, and what would change it."""
    profile: NonNegativeInt = 0
    """Steps to trace with the JAX profiler, after the first three."""
    sample_prompt: Annotated[
        tuple[str, ...],
        Excludes("weights", _EACH_TOKEN, lambda place: place != "device"),
        Excludes("embeddings", _EACH_TOKEN, lambda place: place != "device"),
    ] = ()
    """Prompts to answer before and after training, and at each evaluation."""
    sample_image: Annotated[tuple[str, ...], Requires(("sample_prompt",), "it is shown with each of these")] = ()
    """Image file to show with each sample prompt; of several, each prompt is answered for each."""
    sample_tokens: PositiveInt = 48
    """Longest answer to a sample prompt, in tokens."""
    compilation_cache: Path | None = Path("~/.cache/jaxglue/xla")
    """Folder on a local disk that keeps compiled programs for the next run, unless JAX_COMPILATION_CACHE_DIR names one;
    none keeps none."""

    def validate(self) -> None:
        """Refuse a malformed mesh."""
        from jaxglue.sharding.mesh import AUTO, MeshShape

        if self.mesh != AUTO:
            MeshShape.parse(self.mesh)

    @property
    def trackers(self) -> tuple[str, ...]:
        """Return the names in `log_to`, each once."""
        return tuple(dict.fromkeys(name for name in self.log_to if name not in ("", "none")))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PartsConfig):
    """Fine-tune a language model on packed rows."""

    help_layout: ClassVar = HelpLayout(
        common=(
            *("model", "method", "quantize", "data", "eval_fraction", "seq_len", "objective", "rank", "alpha"),
            *("optimizer", "learning_rate", "output", "batch_size", "gradient_accumulation_steps", "epochs", "steps"),
            *("resume", "dry_run", "remat", "mesh"),
        ),
        sections={
            "execution": (
                "How steps are computed: their time and memory. Recipes have these keys in model, optimizer and run.",
                (
                    *("dtype", "attention", "remat", "tile", "layers_per_program", "memory_limit", "weights"),
                    *("embeddings", "expand_experts", "matmul", "fp8_max_error", "fp8_head", "fp8_experts"),
                    *("update_in_backward", "mesh", "profile", "compilation_cache"),
                ),
            )
        },
    )
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def validate(self) -> None:
        """Settle the method's learning rate and the place of weights that sampling reads; refuse contradictions."""
        self._settle_weights()
        if self.optimizer.learning_rate is None:
            optimizer = replace(self.optimizer, learning_rate=self.default_learning_rate)
            object.__setattr__(self, "optimizer", optimizer)
        objective = self.objective.kind
        of_objective: list[Excludes | Requires] = [*objective.requires, *objective.excludes]
        refuse_contradictions(self, {"objective": of_objective, "optimizer": self.optimizer.kind.excludes})

    def _validate_present(self) -> None:
        """Settle the place of weights that sampling reads; refuse contradictions, but nothing that is missing."""
        self._settle_weights()
        refuse_contradictions(self, {"objective": self.objective.kind.excludes})

    def _settle_weights(self) -> None:
        """Keep weights that sampling reads on the device, where no place is given."""
        if self.model.weights == "auto" and (self.run.sample_prompt or self.objective.kind.needs_rollouts):
            object.__setattr__(self, "model", replace(self.model, weights="device"))

    @property
    def default_learning_rate(self) -> float:
        """Return the learning rate of the method and the objective where none is given."""
        return self.objective.kind.learning_rates[self.model.method] * self.optimizer.kind.rate_factor

    @property
    def shared(self) -> "TrainConfig":
        """Return the configuration without this process's own part, equal on all processes and at a resume."""
        return replace(self, distributed=DistributedConfig())

    @property
    def inputs(self) -> list[str]:
        """Return the files and folders that the run reads."""
        template = self.data.chat_template
        files = (
            None if template is not None and is_jinja(template) else template,
            self.model.adapter,
            self.model.new_tokens,
        )
        sources = (source.name for source in (*self.data.sources, *self.data.eval_sources))
        return [self.model.model, *sources, *(str(file) for file in files if file is not None)]


def recorded_config(path: Path) -> TrainConfig:
    """Read the `config.toml` of a run.

    Raises:
        ValueError: it cannot be read, or records parts that this process has not imported.
    """
    require_parts(read_tables(path).get("parts", ()), str(path))
    return load_config(TrainConfig, path)
