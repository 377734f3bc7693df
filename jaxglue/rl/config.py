"""Settings of answers that the model writes in training, and of their rewards, under TRL's names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxglue.generation.config import Drafts, is_number
from jaxglue.objectives.objective import frozen_vocabulary
from jaxglue.ops.choices import Quantize
from jaxglue.settings.config import Alias, Code, Config, Excludes, NonNegativeInt, Range, Requires, Synonyms


def file_of_function(text: str) -> str | None:
    """Return the file of a function, `rewards.py:exact_match?weight=2`; None for the name of a shipped one."""
    return text.partition("?")[0].rpartition(":")[0] or None


def _is_on(choice: str) -> bool:
    return choice == "on"


def _is_base(teacher: str | None) -> bool:
    return teacher == "base"


def file_of_environment(text: str) -> str | None:
    """Return the file of an environment, `games.py:Game`, or what else runs code; None for a shipped one."""
    name, _, settings = text.partition("?")
    return file_of_function(text) or (text if name == "sandbox" and "unsafe" in settings else None)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config):
    """Answers that the model writes in training, and their rewards."""

    reward: Annotated[tuple[str, ...], Alias("reward_funcs", "reward_functions"), Code(file_of_function)] = ()
    """Judges of answers: functions of Python files, `rewards.py:exact_match`; exact, math, regex, json_schema, length;
    or model, of `jaxglue train --objective reward`. Settings follow, such as `length?soft=400&hard=512&weight=0.5`."""
    num_generations: (
        Annotated[int, Range(ge=1, le=2**16), Alias("group_size", "rollout_n", "n_samples_per_prompt", "num_rollouts")]
        | None
    ) = None
    """G: answers to each prompt; by default 8, of RLOO 2, of distillation 1."""
    generation_batch_size: Annotated[int, Range(ge=1, le=2**20)] = 64
    """Answers that are sampled together; a multiple of num_generations."""
    max_completion_length: Annotated[int, Range(ge=1, le=2**24), Alias("max_response_length")] = 512
    """The most tokens of an answer."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    """Sample answers from the fewest most likely tokens whose probabilities reach this sum; as with --top-k and
    --min-p, log-probabilities in loss, ratios and divergence stay those among all tokens."""
    top_k: NonNegativeInt = 0
    """Sample them from this many most likely tokens; 0 samples from all."""
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    """Sample them from tokens at least this share as likely as the likeliest one."""
    steps_per_generation: Annotated[int, Range(ge=1, le=2**16)] = 1
    """Optimizer steps among which the answers that were sampled together are divided."""
    num_iterations: Annotated[int, Range(ge=1, le=1000)] = 1
    """Times that they are trained on."""
    dynamic_sampling: bool = False
    """Replace prompts whose answers all have the same reward by further ones (DAPO, arXiv 2503.14476)."""
    reward_timeout: Annotated[float, Range(gt=0, le=86_400)] = 60.0
    """Seconds in which a function must judge an answer, or all answers to a prompt at once; else these have no
    reward."""
    reward_memory: Annotated[float, Range(gt=0, le=65_536)] = 8.0
    """GiB of address space of a process that judges answers."""
    reward_workers: Annotated[int, Range(ge=1, le=1024)] = 2
    """Processes that judge answers."""

    environment: Annotated[str | None, Code(file_of_environment)] = None
    """What the model talks to: a class of a Python file, `games.py:Game`, whose methods are tools, as TRL's
    environment_factory; or a function that replies with the next message, or a reward, which ends the conversation."""
    environment_images: Annotated[bool, Requires(("environment",), "it shows them")] = False
    """The environment shows images, in results of tools, replies or what reset adds to the prompt: the model's vision
    tower is loaded, though rows may have none."""
    max_turns: Annotated[int, Range(ge=1, le=10_000)] = 8
    """The most answers of the model in a conversation with --environment."""
    max_episodes: Annotated[int, Range(ge=1, le=2**20)] | None = None
    """The most episodes under way at once; by default all of a generation."""
    max_num_seqs: Annotated[int, Range(ge=1, le=2**16)] | None = None
    """The most answers that are written at once; by default as many as memory holds."""
    staleness: Annotated[
        int,
        Range(ge=0, le=64),
        Excludes("exact_sampling", "answers are of older weights", _is_on),
        Excludes("drafts", "the draft head is beside the weights that train", lambda drafts: drafts != "off"),
        Excludes("importance_sampling_mode", "it corrects for older weights", lambda mode: mode == "none"),
    ] = 0
    """K: generations that are sampled ahead, while earlier ones are trained on, by weights which are that many
    generations old; 0 samples and trains by turns. Of two GPUs, one samples."""
    exact_sampling: Annotated[
        Literal["auto", "on", "off"],
        Excludes("environment", "answers of an environment have parts that no one sampled", when=_is_on),
        Excludes("lmbda", "answers of the rows were not sampled", when=_is_on),
        Excludes("temperature", "kernels of the loss are for 1", lambda temperature: temperature != 1, when=_is_on),
        Excludes("dropout", "sampling drops no inputs", bool, when=_is_on),
        Excludes("quantize", "it is for weights of 16 or 32 bits", lambda storage: storage != "none", when=_is_on),
        Excludes("attention", "it has an attention of its own", when=_is_on),
    ] = "auto"
    """Sample with the very bits of training, whatever is decoded together: log-probabilities of sampling are then those
    of the loss, and ratios of the first update are 1. auto takes it where a step takes at most a twentieth longer, by
    what was measured on the GPU."""
    drafts: Annotated[
        Drafts,
        Synonyms(**{"0": "off"}),
        Excludes("exact_sampling", "drafts are verified several at a time", _is_on, when=is_number),
    ] = "off"
    """Tokens that the folder's draft head (MTP), or --draft-model, proposes for each step of an answer, all verified
    together; auto: as many as save time, by the answers under way and how many drafts they accept."""
    draft_model: Annotated[Path | None, Requires(("drafts",), "it drafts")] = None
    """Folder of a draft head of EAGLE-3's kind for the model that trains, such as jaxglue draft writes."""
    history: Literal["append", "branch"] = "append"
    """What a turn of an episode follows: all tokens before it as they were written, or what the chat template makes of
    the messages, which may drop earlier thinking; each turn is then a row of its own."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn's tokens are trained by: the reward of the whole episode, or that of the turn and those after it."""
    dead_episodes: Literal["drop", "zero", "stop"] = "drop"
    """What becomes of an episode whose environment fails, ends its process or reaches a limit: it has no reward, or a
    reward of 0, or the run stops."""
    teacher: Annotated[
        str | None,
        Excludes(
            "method",
            "base is the model without its adapter",
            lambda method: method == "full",
            when=_is_base,
            remedy="name a folder as the teacher",
        ),
        Excludes("teacher_quantize", "base is stored as the model in training", when=_is_base),
        *(
            each
            for each in frozen_vocabulary(
                "base is the model without adapters, whose embedding and head stay frozen", when=_is_base
            )
            if each.setting != "targets"
        ),
    ] = None
    """Model folder whose distributions are distilled; or base, the model without its adapter."""
    teacher_quantize: Quantize | None = None
    """Storage of the linear layers of a teacher's folder; by default that of the model in training."""
    teacher_server: tuple[str, ...] = ()
    """Teachers behind servers of OpenAI's completions, which return log-probabilities of prompts: an address,
    `http://127.0.0.1:8000/v1?model=name`; several have names before it, `math=http://…`, and rows name one in a column
    teacher."""
    teacher_system: str | None = None
    """System message of the teacher's prompts alone, in which {name} stands for a column of the row."""
    lmbda: Annotated[float, Range(ge=0, le=1)] = 1.0
    """Chance that a step of distillation is on the model's answers, else on those of its rows (GKD)."""

    @property
    def begun_episodes(self) -> int:
        """Return the most episodes under way at once; 0 without an environment."""
        if self.environment is None:
            return 0
        most = self.generation_batch_size
        return most if self.max_episodes is None else min(most, self.max_episodes)

    def answers_to_each(self, default: int, *, compared: bool) -> int:
        """Return G, by default that of the objective.

        Raises:
            ValueError: one answer where several are compared; or the answers sampled together are no multiple of it, or
                fewer prompts than steps.
        """
        count = default if self.num_generations is None else self.num_generations
        if compared and count < 2:
            raise ValueError(
                "--num-generations 1: a reward is compared with those of the prompt's other answers: give 2 or more"
            )
        if self.lmbda < 1 and count > 1:
            raise ValueError(f"--lmbda {self.lmbda:g} takes answers of the rows, one each: leave out --num-generations")
        if self.generation_batch_size % count:
            raise ValueError(
                f"--generation-batch-size {self.generation_batch_size} is no multiple of the {count} answers to each "
                "prompt: change it, or --num-generations"
            )
        if (prompts := self.generation_batch_size // count) % self.steps_per_generation:
            raise ValueError(
                f"--steps-per-generation {self.steps_per_generation} does not divide the {prompts} prompts of "
                "--generation-batch-size: change one"
            )
        return count
