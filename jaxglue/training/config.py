"""Configuration of a training run: every field is a flag and a key of a recipe."""

from dataclasses import dataclass, field, replace

from jaxglue.config import Config
from jaxglue.data.config import DataConfig
from jaxglue.distributed import DistributedConfig
from jaxglue.models.lora_config import LoraConfig
from jaxglue.objectives.config import ObjectiveConfig
from jaxglue.training.model_config import ModelConfig
from jaxglue.training.optimizer_config import RATE_FACTORS, OptimizerConfig
from jaxglue.training.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Fine-tune a Llama, Qwen3 or GPT-OSS on packed rows."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def validate(self) -> None:
        """Settle the learning rate of the method; refuse sample prompts on weights in host memory."""
        if self.optimizer.learning_rate is None:
            optimizer = replace(self.optimizer, learning_rate=self.default_learning_rate)
            object.__setattr__(self, "optimizer", optimizer)
        if self.run.on_spike != "nothing" and self.optimizer.update_in_backward:
            raise ValueError(
                f"--on-spike {self.run.on_spike} decides before the update, and --update-in-backward updates before "
                "the gradient norm is known: leave one out"
            )
        for flag, is_given in (("fp8-head", self.model.fp8_head), ("streaming", self.data.streaming)):
            if is_given and not self.objective.kind.supervised:
                raise ValueError(f"--{flag} is for --objective sft, not {self.objective.objective}: leave it out")
        if self.objective.kind.needs_rollouts:
            raise ValueError(
                f"--objective {self.objective.objective} is of answers that no run writes yet: use another"
            )
        if not (self.data.eval_data or self.data.eval_fraction):
            for flag, given in (("--early-stopping", self.run.early_stopping), ("--keep", self.run.keep != "last")):
                if given:
                    raise ValueError(f"{flag} goes by the eval loss: give --eval-data or --eval-fraction")
        if self.data.streaming and not self.run.steps:
            raise ValueError("--streaming: a stream has no epochs: give --steps")
        self._check_trainables()
        if self.objective.kind.trains_scores and self.run.sample_prompt:
            raise ValueError("--sample-prompt asks for text, and a reward model writes none: leave it out")
        for name in ("weights", "embeddings"):
            if self.run.sample_prompt and getattr(self.model, name) != "device":
                raise ValueError(f"--sample-prompt needs --{name} device: each generated token reads them all")

    def _check_trainables(self) -> None:
        """Refuse a trained embedding in host memory, settings of adapters where all train, and DoRA on split rows."""
        from jaxglue.sharding.mesh import AUTO, MeshShape

        if self.lora.dora and self.run.mesh != AUTO and MeshShape.parse(self.run.mesh).tensor > 1:
            raise ValueError(
                f"--dora needs whole rows of the weights: use a --mesh without tensor, not {self.run.mesh}"
            )
        whole = self.lora.modules_to_save
        if self.objective.kind.trains_scores and "lm_head" in whole:
            raise ValueError("--modules-to-save lm_head: a reward model has a score in its place, which trains anyway")
        if self.model.embeddings == "host" and "embed_tokens" in whole:
            raise ValueError(
                "--embeddings host needs a frozen table: leave it out, or embed_tokens in --modules-to-save"
            )
        for name in ("modules_to_save", "trainable_token_indices", "dora"):
            if self.model.method == "full" and getattr(self.lora, name):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is for adapters, and --method full trains all weights: leave it out")
        if not (whole or self.lora.trainable_token_indices or self.model.new_tokens):
            return
        if self.objective.kind.needs_reference and self.model.method == "lora":
            raise ValueError(
                f"--objective {self.objective.objective} compares with a model without adapters, so embedding and head "
                "stay frozen: leave out --modules-to-save, --trainable-token-indices and --new-tokens"
            )
        if self.model.fp8_head:
            raise ValueError("--fp8-head needs a frozen head: leave it out, or train no embeddings and new tokens")

    @property
    def default_learning_rate(self) -> float:
        """Return the learning rate of the method and the objective where none is given."""
        return self.objective.kind.learning_rates[self.model.method] * RATE_FACTORS.get(self.optimizer.optimizer, 1.0)

    @property
    def shared(self) -> "TrainConfig":
        """Return the configuration without this process's own part, equal on all processes and at a resume."""
        return replace(self, distributed=DistributedConfig())

    @property
    def inputs(self) -> list[str]:
        """Return the files and folders that the run reads."""
        files = (self.data.chat_template, self.model.adapter, self.model.new_tokens)
        sources = (source.name for source in (*self.data.sources, *self.data.eval_sources))
        return [self.model.model, *sources, *(str(file) for file in files if file is not None)]
