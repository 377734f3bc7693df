"""What stays the same over a run of reinforcement learning: prompts, sizes, objective and judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from jaxglue.data.images import ImageRules
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.rl.config import RolloutConfig
from jaxglue.rl.pack import Group, Packed, pack_groups
from jaxglue.rl.prompts import Prompt, PromptDataset, positions
from jaxglue.rl.rewards import Judge
from jaxglue.rl.teachers import ServedTeachers


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Prompts, what their answers are trained with, and sizes.

    Raises:
        ValueError: a prompt that settings leave without a use, or sizes that contradict each other.
    """

    dataset: PromptDataset
    objective: RolloutObjective
    config: RolloutConfig
    judge: Judge
    seq_len: int
    """Tokens of a packed row."""
    batch_size: int
    """Rows of a micro-batch, over all devices."""
    seed: int
    """Of the order of prompts."""
    shared: bool = True
    """A row holds a prompt once; else each answer has a copy."""
    copies: bool = False
    """Rows with shared prompts say where operations that follow one continuation find copies."""
    teachers: ServedTeachers | None = None
    """Servers whose models judge tokens, if there are any."""
    held_out: PromptDataset | None = None
    """Prompts that are answered in evaluations, if there are any."""
    tile: int | None = None
    """Sampling is exact: prompts and answers begin at multiples of so many tokens of a row, attention's tiles of keys;
    None where it is near."""

    def __post_init__(self):
        _check_prompts(self.dataset.prompts, self.config.environment, answered=self.config.lmbda < 1)
        _check_prompts(self.held_out.prompts if self.held_out else (), self.config.environment, answered=False)
        assert self.answers  # or its error would come later
        if self.config.credit == "turn":
            self._check_credit()

    def _check_credit(self) -> None:
        """Refuse credit by turn where there are no turns, or an objective that takes answers whole."""
        name = self.objective.config.objective
        if self.config.environment is None:
            raise ValueError("--credit turn is for episodes, which need an --environment")
        if not self.objective.credits_tokens:
            raise ValueError(
                f"--credit turn is not for --objective {name}, which takes answers whole: use --credit episode, or "
                "dapo, grpo, dr_grpo, bnpo, cispo or sapo"
            )

    @cached_property
    def answers(self) -> int:
        """Return G, the answers to each prompt."""
        return self.config.answers_to_each(self.objective.generations, compared=self.objective.compares)

    @property
    def prompts(self) -> int:
        """Return the number of prompts that are answered together."""
        return self.config.generation_batch_size // self.answers

    @property
    def most_rows(self) -> int:
        """Return the most answers of a generation as training reads them: turns of episodes may be some."""
        branches = self.config.environment is not None and self.config.history == "branch"
        return self.config.generation_batch_size * (self.config.max_turns if branches else 1)

    @property
    def window(self) -> int:
        """Return the optimizer steps on the same answers."""
        return self.config.steps_per_generation * self.config.num_iterations

    def rows(self, position: int) -> list[int]:
        """Return the rows of the dataset that are answered together, from a position in the run's order on."""
        return list(islice(positions(len(self.dataset), self.seed, position), self.prompts))

    @property
    def rules(self) -> ImageRules | None:
        """Return the rules for images of prompts and environments; None where there are none."""
        readers = (data.reader for data in (self.dataset, self.held_out) if data is not None)
        return next((reader.rules for reader in readers if reader is not None), None)

    def pack(self, groups: Sequence[Group]) -> list[Packed]:
        """Return the groups in micro-batches of the run's shape."""
        return pack_groups(
            groups,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            slots=self.most_rows,
            shared=self.shared,
            copies=self.copies,
            reader=self.dataset.reader,
            tile=self.tile or 1,
        )

    @property
    def description(self) -> str:
        """Return a line about the answers of a step, for the panel of the run."""
        specs, longest = self.judge.specs, self.config.max_completion_length
        names = " + ".join(spec.name if spec.weight == 1 else f"{spec.weight:g} × {spec.name}" for spec in specs)
        sizes = f"{self.prompts:,} prompts × {self.answers:,} answers of at most {longest:,} tokens"
        steps = f", {self.window} steps on each" if self.window > 1 else ""
        copied = "" if self.shared else "; each answer has a copy of its prompt"
        judged = f"; reward: {names}" if names else ""
        return f"{sizes}{steps}{judged}{copied}"

    @property
    def typical_prompts(self) -> list[list[int]]:
        """Return as many prompts as a step answers, spread over all by length, the longest of all and held-out ones."""
        order = np.argsort(self.dataset.lengths, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, self.prompts).round().astype(int)[::-1]]
        typical = [self.dataset.prompts[row].tokens for row in chosen]
        longest = max((prompt.tokens for prompt in self.held_out.prompts), key=len) if self.held_out else typical[0]
        if self.judge.kinds is not None:  # which may add to any prompt
            longest = [*typical[0], *typical[0][-1:] * (self.seq_len - self.config.max_completion_length)]
            longest = longest[: max(self.seq_len - self.config.max_completion_length, len(typical[0]))]
        return [max(typical[0], longest, key=len), *typical[1:]]

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that the order of data depends on, as JSON."""
        return {
            **{"data": self.dataset.fingerprint, "seed": self.seed, "seq_len": self.seq_len},
            **{"batch_size": self.batch_size, "copies": self.copies},
            **{"answers": self.answers, "prompts": self.prompts, "window": self.window},
            "tile of --exact-sampling": self.tile,
        }


def _check_prompts(prompts: Sequence[Prompt], environment: str | None, *, answered: bool) -> None:
    """Raise ValueError for a text with an environment, or a row without an answer where all are to have one."""
    for prompt in prompts:
        if environment is not None and isinstance(prompt.content, str):
            raise ValueError(
                f"{prompt.origin}: --environment needs prompts of messages or questions, and this one is a text"
            )
        if answered and not prompt.given:
            raise ValueError(f"{prompt.origin}: --lmbda below 1 needs rows with answers, and this one has none")
