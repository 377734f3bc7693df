"""Answers of several turns: an environment reads a conversation and says the next message, or gives a reward."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxglue.data.template import ChatTemplate, trained_stops
from jaxglue.rl.prompts import Prompt
from jaxglue.rl.sampler import Sample
from jaxglue.text.tool_calls import format_of, parameters_of, schemas_of, split_calls

Reply = list[dict[str, Any]] | float | None
"""The next messages, the reward that ends the conversation, or its end without one."""
_TURN = "■"
"""Stands for the text of a turn, and is in no template: a letter might be in the token that ends the turn."""
_log = logging.getLogger(__name__)


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
    is_last: bool = False
    """No further message can be answered: the turns or tokens are used up, or the last answer was cut."""
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
            self._text([part.text for part in written]),
            counted=np.concatenate(counted),
            reward=self.reward,
            messages=self.messages,
        )

    def _text(self, written: Sequence[str]) -> str:
        """Return the conversation as a text, the model's turns as they were written."""
        if len(written) == 1:
            return written[0]
        turns = iter(written)
        said = [(m["role"], next(turns) if m["role"] == "assistant" else m["content"]) for m in self.messages]
        return "\n".join(f"{role}: {text}" for role, text in said)


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
        self._template, self._tokenizer = ChatTemplate(tokenizer), tokenizer
        self._form = format_of(str(tokenizer.get_chat_template(tools=[])))
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in trained_stops(tokenizer)]
        self._refused = False

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
            Episode(prompt, [self._message(prompt, answer, 0)], [answer])
            for prompt, group in zip(prompts, first, strict=True)
            for answer in group
        ]
        # Random keys take 32 bits, and held-out prompts have indices beyond all others.
        numbers = [(index * count + answer) % (1 << 32) for index in indices for answer in range(count)]
        for turn in range(1, self._turns + 1):
            going = [place for place, episode in enumerate(episodes) if not episode.is_over]
            for episode in (episodes[place] for place in going):
                episode.is_last = turn == self._turns or not episode.parts[-1].ended
                episode.is_last |= len(episode.tokens) + 1 >= self._longest
            for place, reply in zip(going, self._reply([episodes[place] for place in going]), strict=True):
                self._receive(episodes[place], reply)
            going = [place for place in going if not episodes[place].is_over]
            if not going:
                break
            asked = [[*episodes[place].prompt.tokens, *episodes[place].tokens] for place in going]
            room = [self._longest - len(episodes[place].tokens) for place in going]
            for place, answer in zip(going, sample(asked, [numbers[p] for p in going], turn, room), strict=True):
                episodes[place].parts.append(answer)
                message = self._message(episodes[place].prompt, answer, turn)
                episodes[place].messages.append(message)
        answers = [episode.answer() for episode in episodes]
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    def _message(self, prompt: Prompt, answer: Sample, turn: int) -> dict[str, Any]:
        """Return an answer as a message, with its calls of the prompt's tools; these stand between special tokens."""
        if not prompt.tools:
            return {"role": "assistant", "content": answer.text}
        text = str(self._tokenizer.decode(answer.tokens[: -1 if answer.ended else None].tolist()))
        rest, calls = split_calls(text, parameters_of(schemas_of(prompt.tools)), self._form)
        if not calls:
            return {"role": "assistant", "content": answer.text}
        for token in self._tokenizer.all_special_tokens:
            rest = rest.replace(token, "")
        listed = [
            # nine digits, which Mistral's templates ask for
            {"id": f"{turn:04}{number:05}", "type": "function"}
            | {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for number, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": rest.strip(), "tool_calls": listed}

    def _receive(self, episode: Episode, reply: Reply) -> None:
        """Append the environment's messages, or end the conversation: also where no token is left for an answer."""
        if not isinstance(reply, list):
            episode.reward, episode.is_over = math.nan if reply is None else float(reply), True
            return
        replies = _named(reply, episode.messages[-1].get("tool_calls", []))
        tokens = None if episode.is_last else self._between(episode, replies)
        if tokens is None or len(episode.tokens) + len(tokens) >= self._longest:
            episode.is_over = True
            return
        unknown, apart = np.full(len(tokens), np.nan, np.float32), np.zeros(len(tokens), bool)
        episode.parts.append(Sample(np.array(tokens, np.int32), unknown, True, counted=apart))
        episode.messages += replies

    def _between(self, episode: Episode, replies: list[dict[str, Any]]) -> list[int] | None:
        """Return the tokens from the end of the model's turn to the start of its next.

        The turn's own tokens stay as they were sampled: a sign stands for its text in the template. None where the
        template refuses the model's tool calls, such as several at a time.
        """
        assert not isinstance(episode.prompt.content, str)
        sign, said = _TURN, json.dumps(replies, ensure_ascii=False)
        while sign in said:
            sign += _TURN
        turns = [_signed(m, sign) if m["role"] == "assistant" else m for m in episode.messages]
        messages = [*episode.prompt.content, *turns, *replies]
        calls = bool(episode.messages[-1].get("tool_calls"))
        try:
            rendered = self._template.render_prompt(*self._template.protect(messages, episode.prompt.tools))
        except ValueError as error:
            if not calls:
                raise ValueError(f"--environment, {episode.prompt.origin}: {error}") from error
            if not self._refused:
                self._refused = True
                _log.warning("%s: %s; such conversations end at this turn", episode.prompt.origin, error)
            return None
        if sign not in rendered:
            raise ValueError(f"--environment, {episode.prompt.origin}: the chat template leaves out the model's turn")
        rest = rendered[rendered.rindex(sign) + len(sign) :]
        if not calls:
            tokens = self._template.encode(rest)
            return tokens[1:] if tokens[0] == episode.parts[-1].tokens[-1] else tokens
        last = str(self._tokenizer.convert_ids_to_tokens(int(episode.parts[-1].tokens[-1])))
        if last in rest:
            return self._template.encode(rest.partition(last)[2])
        ends = [place for end in self._ends if (place := rest.find(end)) >= 0]
        return self._template.encode(rest[min(ends) :]) if ends else None


def _signed(message: dict[str, Any], sign: str) -> dict[str, Any]:
    """Put a sign in place of the text of a turn, or of the arguments of its last tool call."""
    if not (calls := message.get("tool_calls")):
        return message | {"content": sign}
    last = calls[-1] | {"function": calls[-1]["function"] | {"arguments": {sign: sign}}}
    return message | {"content": "", "tool_calls": [*calls[:-1], last]}


def _named(replies: list[dict[str, Any]], calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give results of tools the names and numbers of the calls in their order, where they say none."""
    known = iter(calls)
    named = []
    for reply in replies:
        call = next(known, None) if reply["role"] == "tool" else None
        own = {} if call is None else {"name": call["function"]["name"], "tool_call_id": call["id"]}
        named.append(own | reply)
    return named
