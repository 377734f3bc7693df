"""Answers to sample prompts before and after training, and at each evaluation."""

from pathlib import Path

from rich.console import Console

from jaxglue.generation.chat import in_order, stop_tokens
from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.generator import Generator, Request
from jaxglue.generation.prompts import encode_prompt
from jaxglue.models.parameters import ModelGraphDefs, Params
from jaxglue.training.metrics import read_steps
from jaxglue.training.own_lines import rewrite_lines
from jaxglue.training.setup import Setup

_AT_ONCE = 8
"""Prompts answered together: training leaves little memory."""


class Samples:
    """Answers the sample prompts of a run, on the console and in `samples.jsonl`."""

    def __init__(self, setup: Setup, graphdefs: ModelGraphDefs, folder: Path | None, console: Console):
        """Encode the prompts.

        Args:
            setup, graphdefs: the run and its model.
            folder: of `samples.jsonl`; None on processes that write nothing.
            console: where to print.

        Raises:
            ValueError: the tokenizer has no chat template, or its template refuses a prompt.
        """
        model, run = setup.config.model, setup.config.run
        self._tokenizer, self._console, self._path = setup.tokenizer, console, folder and folder / "samples.jsonl"
        self._prompts = {prompt: encode_prompt(setup.tokenizer, prompt) for prompt in run.sample_prompt}
        self._stops = stop_tokens(setup.tokenizer)
        self._generator = Generator(graphdefs, setup.model, dtype=model.compute_dtype, attention=model.attention)
        self._sampling = SamplingConfig(max_tokens=run.sample_tokens, temperature=0.0)

    def answer(self, when: str, step: int, trainable: Params, frozen: Params) -> None:
        """Answer every prompt greedily."""
        lines, requests = [], [Request(tokens, self._sampling) for tokens in self._prompts.values()]
        if not requests:
            return
        plan = self._generator.plan(requests, _AT_ONCE)
        answers = self._generator.answers(trainable, frozen, requests, self._stops, plan=plan)
        for prompt, answer in zip(self._prompts, in_order(self._tokenizer, answers), strict=True):
            self._console.print(f"{when} training: {prompt} → {answer}", markup=False, highlight=False)
            lines.append({"step": step, "prompt": prompt, "answer": answer})
        if self._path:
            _append(self._path, step, lines)


def _append(path: Path, step: int, lines: list[dict]) -> None:
    """Write the lines of a step after those of earlier ones; a resumed run may write them again."""
    before = read_steps(path)
    lines = [*(line for line in before.intact if line["step"] < step), *lines]
    rewrite_lines(path, lines, before.damaged, ensure_ascii=False)
