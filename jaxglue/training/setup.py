"""Everything that is known, checked and decided before the accelerator has work to do."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerBase

from jaxglue.cli import as_dict
from jaxglue.data import BatchIterator, EvalBatches, PreparedData, load_tokenizer, prepare_data
from jaxglue.distributed import SINGLE_PROCESS, Processes
from jaxglue.hf.checkpoint import open_checkpoint, read_config
from jaxglue.models import config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.decoder import CausalLM
from jaxglue.models.parameters import ModelGraphDefs, Params, split_model
from jaxglue.ops.adam import MOMENT_BYTES
from jaxglue.ops.attention import ATTENTION, AttentionShape
from jaxglue.ops.backend import compute_capability
from jaxglue.ops.moe import choose_backend as choose_grouped_backend
from jaxglue.ops.norm_rope import NORM_ROPE
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.planner.flops import mean_visible_keys, training_flops_per_token
from jaxglue.planner.gpus import GIB
from jaxglue.planner.workload import abstract_model
from jaxglue.sharding.layout import Layout
from jaxglue.sharding.mesh import AUTO, MeshShape, make_mesh, own_rows
from jaxglue.sharding.plan import plan_split
from jaxglue.training.config import TrainConfig
from jaxglue.training.devices import agree_on_mesh
from jaxglue.training.remat import RematChoice

_STORED = {"none": "", **{how: f", linear layers of the decoder layers in {how}" for how in FORMATS[1:]}}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that could start: shapes, tokenizer, data and steps."""

    config: TrainConfig
    model: DecoderConfig
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    mesh: MeshShape
    remat: RematChoice
    batches: BatchIterator
    eval_batches: EvalBatches | None
    total_steps: int

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward over the training documents."""
        visible = mean_visible_keys(self.data.train.lengths)
        full = self.config.model.method == "full"
        return training_flops_per_token(self.model, visible_keys=visible, weight_gradients=full)

    @cached_property
    def _abstract_model(self) -> CausalLM:
        lora = self.config.lora if self.config.model.method == "lora" else None
        return abstract_model(self.model, lora, self.config.model.compute_dtype)

    @cached_property
    def _abstract_parts(self) -> tuple[ModelGraphDefs, Params, Params]:
        return split_model(self._abstract_model, trainable_filter(self.config))

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.mesh.abstract, self.config.model.compute_dtype)

    @cached_property
    def parameter_counts(self) -> tuple[int, int]:
        """(parameters of the model with its adapters, those that train)."""
        model = self._abstract_model
        return _count(nnx.state(model)), _count(nnx.state(model, trainable_filter(self.config)))

    @property
    def weight_bytes(self) -> int:
        """Of weights, their float32 masters and gradients, and AdamW's two moments, on each GPU."""
        _, *trees = self._abstract_parts
        trained, frozen = (self._layout.local(tree, self._layout.param_specs(tree)) for tree in trees)
        if self.config.model.embeddings == "host":
            frozen = {**frozen, "embed_tokens": {}}
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
        each = 8 + MOMENT_BYTES[self.config.optimizer.moments]  # float32 master, gradient, and AdamW's two moments
        return weights + round(each * sum(leaf.size for leaf in jax.tree.leaves(trained)))

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with the one that it continues."""
        config = as_dict(self.config)
        return {
            "model": hashlib.sha256(repr(self.model).encode()).hexdigest()[:16],
            "weights": _weights_digest(self.config),
            "data": self.data.fingerprint,
            "seed": self.config.data.seed,
            "method": self.config.model.method,
            "router_losses": list(self.config.model.router_losses or ()),
            "dtype": str(self.config.model.compute_dtype),
            "lora": config["lora"] if self.config.model.method == "lora" else None,
            "optimizer": config["optimizer"],
            "steps": self.total_steps,
            "batch": [
                self.config.run.gradient_accumulation_steps,
                self.config.run.batch_size,
                self.config.data.seq_len,
            ],
        }

    def plan(self) -> dict[str, object]:
        """The rows of the panel that is shown before training."""
        run, data = self.config.run, self.config.data
        total, trained = self.parameter_counts
        epochs = self.total_steps / self.batches.steps_per_epoch
        attention = self._attention()
        memory, each = self.weight_bytes / GIB, " on each GPU" if self.mesh.devices > 1 else ""
        rotation = NORM_ROPE.choose(compute_capability(), self.config.model.compute_dtype)
        return {
            "model": f"{self.config.model.model} ({self.model.model_type}, {total:,} parameters)",
            "method": f"{self.config.model.method}, {trained:,} parameters train ({trained / total:.2%})",
            "data": self.data.report,
            "batch": f"{run.gradient_accumulation_steps} × {run.batch_size} rows of {data.seq_len:,} tokens",
            "steps": f"{self.total_steps:,} ({self.batches.steps_per_epoch:,} an epoch, {epochs:.2f} epochs)",
            "dtype": f"{self.config.model.compute_dtype}{_STORED[self.model.quantize]}",
            "remat": self.remat,
            "attention": f"{attention.name}: {attention.reason}",
            "rotation": f"{rotation.name}: {rotation.reason}",
            **self._experts(),
            **self._devices(),
            "memory": f"{memory:.2f} GiB for weights, gradients and optimizer{each}; activations on top",
            "output": run.output,
        }

    def _experts(self) -> dict[str, object]:
        """The plan's row about experts; none for dense models."""
        if (moe := self.model.moe) is None:
            return {}
        choice = choose_grouped_backend(self.config.model.compute_dtype, capability=compute_capability())
        stored = ", in MXFP4" if moe.mxfp4 else ""
        served = f"{moe.num_experts_per_tok} of {moe.num_experts} for each token{stored}"
        return {"experts": f"{served}; grouped matmul by {choice.name}: {choice.reason}"}

    def _devices(self) -> dict[str, object]:
        """The plan's rows about the GPUs and what they share."""
        kinds: dict[str, object] = {"devices": ", ".join(sorted({device.device_kind for device in jax.devices()}))}
        if self.mesh.devices == 1:
            return kinds
        run, parts = self.config.run, self._abstract_parts[1:]
        tokens = run.batch_size // self.mesh.rows * self.config.data.seq_len
        split = plan_split(
            self._layout, self.model, *parts, tokens=tokens, gradient_accumulation_steps=run.gradient_accumulation_steps
        )
        auto = " (auto)" if self.config.run.mesh == AUTO else ""
        return kinds | {"mesh": f"{self.mesh}{auto}; {split}", "communication": split.communication}

    def _attention(self):
        shape = AttentionShape(
            dtype=self.config.model.compute_dtype,
            head_dim=self.model.head_dim,
            query_heads=self.model.num_attention_heads,
            kv_heads=self.model.num_key_value_heads,
            seq_len=self.config.data.seq_len,
            segment_slots=self.batches.max_segments,
            window=next((window for window in self.model.layer_windows if window), None),
        )
        return ATTENTION.choose(compute_capability(), shape, backend=self.config.model.attention)


def prepare(config: TrainConfig, processes: Processes = SINGLE_PROCESS) -> Setup:
    """Reads and checks model folder, tokenizer and data; loads no weights.

    Args:
        config: the run.
        processes: those of the run; process 0 tokenizes, the others find the tokens in the cache.

    Raises:
        ValueError: whatever is wrong with them, naming the file and the remedy.
    """
    model = _read_model(config)
    if config.data.seq_len > model.max_position_embeddings:
        raise ValueError(
            f"--seq-len {config.data.seq_len} is above the model's limit of {model.max_position_embeddings} positions "
            f"(max_position_embeddings in {config.model.model}/config.json): lower --seq-len"
        )
    if not config.model.random_weights:
        open_checkpoint(config.model.model)
    tokenizer = load_tokenizer(config.model.model)
    with processes.main_process_first():
        data = prepare_data(config.data, tokenizer, model.vocab_size)
    run, shared = config.run, {"seq_len": config.data.seq_len, "batch_size": config.run.batch_size}
    epochs = None if run.steps else run.epochs
    mesh, remat = agree_on_mesh(config, model, mean_visible_keys(data.train.lengths), processes)
    part, parts = own_rows(make_mesh(mesh) if mesh.devices > 1 else None, run.batch_size)
    share = {"process_index": part, "process_count": parts}
    batches = BatchIterator(
        data.train,
        **shared,
        **share,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        seed=config.data.seed,
        epochs=epochs,
    )
    total_steps = run.steps or batches.total_steps
    assert total_steps is not None
    eval_batches = (
        EvalBatches(data.eval, **shared, max_segments=batches.max_segments, **share) if data.eval is not None else None
    )
    return Setup(
        config=config,
        model=model,
        tokenizer=tokenizer,
        data=data,
        mesh=mesh,
        remat=remat,
        batches=batches,
        eval_batches=eval_batches,
        total_steps=total_steps,
    )


def _read_model(config: TrainConfig) -> DecoderConfig:
    """The model's shape; raises ValueError when the run asks for what it does not have."""
    model = config_from_hf(read_config(config.model.model))
    if config.model.expand_experts:
        model = model.expanded
    model = model.quantized(config.model.quantize)
    if model.quantize != "none" and config.model.method == "full":
        raise ValueError(
            f"{config.model.model} is quantized to {model.quantize}, which holds frozen weights, and with "
            "--method full none are: use --method lora, or the folder of the original"
        )
    if model.moe and model.moe.mxfp4 and config.model.method == "full":
        raise ValueError("--method full cannot train experts in MXFP4: add --expand-experts, or use --method lora")
    if config.model.embeddings == "host" and model.tie_word_embeddings:
        raise ValueError(
            f"--embeddings host: the output projection of {config.model.model} is tied to the table, so the GPU needs "
            "it all: leave it out"
        )
    if config.model.router_losses and model.moe is None:
        raise ValueError(f"{config.model.model} has no routers: leave out --router-balance-loss and --router-z-loss")
    return model


def trainable_filter(config: TrainConfig) -> type[nnx.Param]:
    """Which variables of the model train."""
    return nnx.LoRAParam if config.model.method == "lora" else nnx.Param


def _count(state: nnx.State) -> int:
    """Parameters, of which a byte of MXFP4 holds two."""
    per_item = {"blocks": 2, "scales": 0}
    return sum(per_item.get(str(path[-1]), 1) * int(np.prod(leaf.shape)) for path, leaf in nnx.to_flat_state(state))


def _weights_digest(config: TrainConfig) -> str:
    """Tells one checkpoint from another by its final norm and the head of its embedding, without reading it all."""
    if config.model.random_weights:
        return "random"
    files = open_checkpoint(config.model.model)
    norm, embedding = files.read("model.norm.weight"), files.read_rows("model.embed_tokens.weight", 0, 64)
    return hashlib.sha256(norm.tobytes() + embedding.tobytes()).hexdigest()[:16]
