"""An answer's text as it grows, and its JSON for OpenAI's clients, as one object or in chunks."""

import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jaxglue.data.decoding import TokenDecoder
from jaxglue.generation.scheduler import Request
from jaxglue.serve.call import Call
from jaxglue.serve.service import Event
from jaxglue.text.stream import CHANNEL, TextStream, added_tokens
from jaxglue.text.thinking import Thought, split_thinking, tags_of
from jaxglue.text.tool_calls import MARKS, shown_before_calls, split_calls
from jaxglue.text.tool_formats import ToolCall

_FINISH = {"stop": "stop", "until": "stop", "length": "length"}
_IMPOSSIBLE = -9999.0
"""Log-probability in JSON of a token that cannot come, as OpenAI's."""


class _TokenText(NamedTuple):
    """A token's text and log-probability, and those of the most likely ones in its place."""

    text: str
    """A character's bytes are its last token's."""
    log_prob: float | None
    """None of a text's first token, which follows nothing."""
    likely: list[tuple[str, float]]


class AnswerText:
    """Text of an answer as it grows."""

    def __init__(self, call: Call, request: Request):
        self._stops, self._call, self._opened = request.stop, call, call.thinks == Thought.BEGUN
        self._echo = call.echo[request.index].text if call.echo else ""
        self._prompt, self._scores = request.prompt, call.echo[request.index].scores if call.echo else None
        tokenizer = call.voice.tokenizer
        self._channels, self._tags = CHANNEL in added_tokens(tokenizer).all, tags_of(tokenizer)
        self._text = TextStream(tokenizer, request.sampling.stop, shown=MARKS if call.functions else ())
        self._decoder = TokenDecoder(tokenizer.backend_tokenizer)
        self._shown, self._shown_thinking, self._certain = 0, 0, 0
        """Characters that were sent, and that are certainly no call."""
        self._calls, self.count = list[ToolCall](), 0
        """Calls of tools, and tokens up to the end."""
        self._log_probs, self._offset = list[_TokenText](), 0
        """Log-probabilities that were not reported, and characters of the tokens before them."""
        self.sampled = list[tuple[int, float]]()
        """Tokens with their log-probabilities, where these are asked for."""
        self._content: str | None = None
        """The text beside tool calls, once these have come."""
        self.drafts = 0, 0
        """Tokens that were drafted, and accepted ones."""
        self.finish: str | None = None
        special = added_tokens(tokenizer).special.items() if request.sampling.stop else ()
        self._special_stops = {id: text for text, id in special if text in request.sampling.stop}
        self._special: str | None = None
        """The special token among the stop texts that came."""

    def add(self, event: Event) -> int:
        """Add an event's tokens; return the number of those up to the answer's end."""
        before, self.drafts = self.count, event.drafts
        for index, token in enumerate(event.tokens):
            self.count += 1
            if self._call.log_probs is not None:
                if token in self._stops:
                    self._end_text()
                self._log_probs.append(self._token_text(event, index))
                self.sampled.append((token, _finite(event.log_probs[index])))
            if token in self._stops:
                self._special = self._special_stops.get(token)
            else:
                self._text.add(token)
            if self._text.stopped:  # what follows in its window is no part of it
                break
        if event.finish:
            self._text.end()
        if self._text.stopped:
            self.finish = "stop"
        elif event.finish:
            self.finish = _FINISH[event.finish]
        if self.finish is not None:
            self._end_text()
        if self.finish is not None and self._call.functions:
            content, calls = split_calls(self._text.text, self._call.functions, self._call.form, opened=self._opened)
            self._calls = calls[:1] if self._call.one_call else calls
            if calls:
                self._content = content
                if self.finish == "stop" and not self._call.named:
                    self.finish = "tool_calls"
        return self.count - before

    @property
    def stop_text(self) -> str | None:
        """Return the text at which the answer ended, if the request names it; a special token's, too."""
        return self._text.stop_text or self._special

    @property
    def _visible(self) -> tuple[str, str]:
        """Return the thinking and the text that are certain to be shown; completions know no thinking."""
        grows, text = self.finish is None, self._text.text if self._content is None else self._content
        if grows and self._call.functions:
            state: dict[str, Any] = {"form": self._call.form, "opened": self._opened}
            text = shown_before_calls(text, self._call.functions, known=self._certain, **state)
            self._certain = len(text)
        if not self._call.chat:
            return "", self._echo + text
        return split_thinking(text, tags=self._tags, opened=self._opened, channels=self._channels, grows=grows)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the whole answer."""
        shared = {"index": index, "finish_reason": self.finish, "logprobs": self._reported()}
        thinking, text = self._visible
        if not self._call.chat:
            return {**shared, "text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["reasoning_content"] = thinking
        if self._calls:
            message |= {"content": text.strip() or None, "tool_calls": [_called(call) for call in self._calls]}
        return {**shared, "message": message}

    def chunk(self, index: int) -> dict[str, Any] | None:
        """Return the new part of the answer; None without one."""
        thinking, text = self._visible
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        new_thinking = thinking[self._shown_thinking :]
        self._shown_thinking = max(self._shown_thinking, len(thinking))
        if not new and not new_thinking and self.finish is None:
            return None
        shared = {"index": index, "finish_reason": self.finish, "logprobs": self._reported()}
        if not self._call.chat:
            return {**shared, "text": new}
        delta: dict[str, Any] = {"content": new}
        if new_thinking:
            delta["reasoning_content"] = new_thinking
        if self._calls:
            delta["tool_calls"] = [{"index": number, **_called(call)} for number, call in enumerate(self._calls)]
        return {**shared, "delta": delta}

    def _token_text(self, event: Event, index: int) -> _TokenText:
        likely = [(self._decoder.text_of(token), value) for token, value in event.top[index]] if event.top else []
        return _TokenText(self._decoder.add(event.tokens[index]), event.log_probs[index], likely)

    def _echoed(self) -> list[_TokenText]:
        """Return the prompt's tokens the first time, where a completion repeats them with log-probabilities."""
        scores, self._scores = self._scores, None
        if scores is None:
            return []
        decoder, entries = TokenDecoder(self._decoder.backend), list[_TokenText]()
        for index, token in enumerate(self._prompt):
            pairs = scores.likely(index - 1) if index else []
            likely = [(decoder.text_of(other), value) for other, value in pairs]
            entries.append(_TokenText(decoder.add(token), scores.log_prob(index - 1) if index else None, likely))
        entries[-1] = entries[-1]._replace(text=entries[-1].text + decoder.rest())
        return entries

    def _end_text(self) -> None:
        """Let the last token that was not reported complete the text, as the answer does, inside of a character too."""
        if self._log_probs:
            last = self._log_probs[-1]
            self._log_probs[-1] = last._replace(text=last.text + self._decoder.rest())

    def _reported(self) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens that were not reported yet."""
        if self._call.log_probs is None:
            return None
        entries, self._log_probs = self._log_probs, []
        if self._call.chat:
            return {"content": [{**_entry(e.text, e.log_prob), "top_logprobs": _entries(e.likely)} for e in entries]}
        entries = [*self._echoed(), *entries]
        texts = [entry.text for entry in entries]
        offsets = list(accumulate(map(len, texts), initial=self._offset))
        self._offset = offsets.pop()
        likely = [_by_text(entry) for entry in entries] if self._call.log_probs else None
        values = [None if entry.log_prob is None else _finite(entry.log_prob) for entry in entries]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": likely, "text_offset": offsets}


def _finite(log_prob: float | None) -> float:
    assert log_prob is not None
    return max(log_prob, _IMPOSSIBLE)


def _entry(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(log_prob), "bytes": list(text.encode())}


def _entries(likely: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return [_entry(text, log_prob) for text, log_prob in likely]


def _by_text(entry: _TokenText) -> dict[str, float] | None:
    """Return the log-probabilities by text; parts of characters have one text, which gets the likeliest's."""
    if entry.log_prob is None:
        return None
    pairs = [*entry.likely, (entry.text, entry.log_prob)]
    return {text: _finite(log_prob) for text, log_prob in reversed(pairs)}


def usage(requests: Sequence[Request], answers: Sequence[AnswerText]) -> dict[str, Any]:
    """Return the numbers of tokens, and of drafts, where there are any, under OpenAI's names for predicted outputs."""
    prompt, new = sum(len(request.prompt) for request in requests), sum(answer.count for answer in answers)
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    drafted, accepted = (sum(counts) for counts in zip(*(answer.drafts for answer in answers), strict=True))
    if drafted:
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        counts["completion_tokens_details"] = details
    return counts


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
