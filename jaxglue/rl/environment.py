"""Answers of several turns: an environment reads a conversation and says the next message, or gives a reward."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import ChatTemplate
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample

Reply = dict[str, Any] | float | None
"""The next message, the reward that ends the conversation, or its end without one."""
_TURN = "■"
"""Stands for the text of a turn, and is in no template: a letter might be in the token that ends the turn."""


class Turns(Protocol):
    """Samples a turn of conversations."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], indices: Sequence[int], turn: int, room: Sequence[int]
    ) -> list:
        """Return a `Sample` of at most `room` tokens for each prompt."""


@dataclass
class Episode:
    """A conversation that grows; its tokens after the prompt are an answer."""

    prompt: Prompt
    messages: list[dict[str, Any]]
    parts: list[Sample]
    reward: float = math.nan
    is_over: bool = False

    @property
    def tokens(self) -> list[int]:
        """Return all tokens after the prompt."""
        return [token for part in self.parts for token in part.tokens.tolist()]

    def answer(self) -> Sample:
        """Return the conversation as an answer; tokens of the environment have no log-probability, and do not count."""
        counted = [np.full(len(p.tokens), True) if p.counted is None else p.counted for p in self.parts]
        written = [part for part in self.parts if part.counted is None]
        return Sample(
            np.concatenate([part.tokens for part in self.parts]),
            np.concatenate([part.log_probs for part in self.parts]),
            written[-1].ended,
            "\n".join(f"{m['role']}: {m['content']}" for m in self.messages) if len(written) > 1 else written[0].text,
            counted=np.concatenate(counted),
            reward=self.reward,
        )


class Environment:
    """Continues answers as conversations.

    Args:
        reply: returns the environment's replies to conversations, each with its prompt.
        tokenizer: of the model, with a chat template.
        turns: the most answers of the model in a conversation.
        longest: the most tokens of a conversation after its prompt.
    """

    def __init__(
        self,
        reply: Callable[[Sequence[Episode]], list[Reply]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        turns: int,
        longest: int,
    ):
        self._reply, self._turns, self._longest = reply, turns, longest
        self._template = ChatTemplate(tokenizer)

    def run(self, prompts: Sequence[Prompt], first: list[list[Sample]], indices: Sequence[int], sample: Turns) -> list:
        """Return the first answers, continued by further turns.

        Args:
            prompts: of conversations.
            first: answers to each.
            indices: of the prompts in the run.
            sample: writes a turn.
        """
        count = len(first[0])
        episodes = [
            Episode(prompt, [{"role": "assistant", "content": answer.text}], [answer])
            for prompt, group in zip(prompts, first, strict=True)
            for answer in group
        ]
        numbers = [index * count + answer for index in indices for answer in range(count)]
        for turn in range(1, self._turns + 1):
            going = [place for place, episode in enumerate(episodes) if not episode.is_over]
            for place, reply in zip(going, self._reply([episodes[place] for place in going]), strict=True):
                self._receive(episodes[place], reply, is_last=turn == self._turns)
            going = [place for place in going if not episodes[place].is_over]
            if not going:
                break
            asked = [[*episodes[place].prompt.tokens, *episodes[place].tokens] for place in going]
            room = [self._longest - len(episodes[place].tokens) for place in going]
            for place, answer in zip(going, sample(asked, [numbers[p] for p in going], turn, room), strict=True):
                episodes[place].parts.append(answer)
                episodes[place].messages.append({"role": "assistant", "content": answer.text})
        answers = [episode.answer() for episode in episodes]
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    def _receive(self, episode: Episode, reply: Reply, *, is_last: bool) -> None:
        """Append the environment's message, or end the conversation: also where no token is left for an answer."""
        if not isinstance(reply, dict):
            episode.reward, episode.is_over = math.nan if reply is None else float(reply), True
            return
        tokens = self._between(episode, reply)
        if is_last or not episode.parts[-1].ended or len(episode.tokens) + len(tokens) >= self._longest:
            episode.is_over = True
            return
        unknown, apart = np.full(len(tokens), np.nan, np.float32), np.zeros(len(tokens), bool)
        episode.parts.append(Sample(np.array(tokens, np.int32), unknown, True, counted=apart))
        episode.messages.append(reply)

    def _between(self, episode: Episode, message: dict[str, Any]) -> list[int]:
        """Return the tokens from the end of the model's turn to the start of its next.

        The turn's own tokens stay as they were sampled: a sign stands for its text in the template.
        """
        assert not isinstance(episode.prompt.content, str)
        before = [*episode.prompt.content, *episode.messages[:-1], {"role": "assistant", "content": _TURN}]
        messages, _ = self._template.protect([*before, message])
        turn = self._template.render(messages[:-1])
        whole = self._template.render_prompt(messages)
        if not whole.startswith(turn):
            raise ValueError("--environment: the chat template changes earlier turns, so that they cannot be continued")
        tokens = self._template.encode(turn[turn.rindex(_TURN) + 1 :] + whole[len(turn) :])
        return tokens[1:] if tokens[0] == episode.parts[-1].tokens[-1] else tokens
