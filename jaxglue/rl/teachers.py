"""Teachers behind servers of OpenAI's completions: log-probabilities that their models give the tokens of answers."""

import json
import re
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from jaxglue.data.images import ImageRules
from jaxglue.rl.pack import images_before
from jaxglue.rl.prompts import Prompt
from jaxglue.vision.rows import Image, PlacedImage

TEACHER = "teacher"
"""Column by which rows choose among several."""
_SPEC = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<url>https?://[^?\s]+)(?:\?model=(?P<model>\S+))?")
_AT_ONCE, _TRIES, _PAUSE = 16, 3, 2.0
"""Requests under way at each server; times that one is made, and seconds between."""
_LONGEST_ERROR = 300
_FORMS: tuple[dict[str, Any], ...] = (
    {"prompt_logprobs": 0, "max_tokens": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
)
"""Fields by which servers return log-probabilities of a prompt: vLLM's own, and OpenAI's."""


class _Scored(NamedTuple):
    log_probs: list[float]
    """Of all tokens but the first, in nats."""
    texts: list[str]
    """Of these tokens."""


class ServedTeacher:
    """A model behind a server.

    Args:
        url: of the interface, such as http://127.0.0.1:8000/v1.
        model: name of it; by default the only one that is served.
        seconds: the most time of an answer.

    Raises:
        ValueError: no such server or model, or one that returns no log-probabilities of prompts.
    """

    def __init__(self, url: str, model: str | None, seconds: float):
        self._url, self._seconds = url.rstrip("/"), seconds
        self._model = self._only_model() if model is None else model
        self._form = next((form for form in _FORMS if self._serves(form)), None)
        if self._form is None:
            raise ValueError(
                f"{self._where}: its completions return no log-probabilities of prompts, neither by prompt_logprobs "
                "nor by echo and logprobs: serve the teacher with vLLM, SGLang or jaxglue serve"
            )
        self._threads = ThreadPoolExecutor(_AT_ONCE, "teacher")

    @property
    def _where(self) -> str:
        return f"--teacher-server {self._url}"

    def _only_model(self) -> str:
        names = [model["id"] for model in self._ask("models")["data"]]
        if len(names) != 1:
            raise ValueError(f"{self._where} serves {', '.join(names)}: choose one, as in {self._url}?model={names[0]}")
        return names[0]

    def _serves(self, form: Mapping[str, Any]) -> bool:
        try:
            return self._complete([0, 0], form) is not None
        except _RefusedError:
            return False

    def check(
        self, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, images: Sequence[PlacedImage] = ()
    ) -> None:
        """Refuse a model whose tokens have other texts, and one that sees no images; only these tokens are compared."""
        if images:
            self._check_sight(images[0].image)
        for token, text in zip(tokens[1:], self._score(tokens, images).texts, strict=True):
            own = str(tokenizer.decode([token]))
            if text.startswith(("bytes:", "token_id:")) or "\ufffd" in own + text or own == text:
                continue  # parts of characters, or no text
            raise ValueError(
                f"{self._where}: token {token} is {text!r} there and {own!r} in the model in training: distilled "
                "models have one vocabulary"
            )

    def _check_sight(self, image: Image) -> None:
        """Refuse a server that leaves out images: it scores a text without a place for one."""
        assert self._form is not None
        try:
            self._complete([0, 0], {**self._form, **_shown([PlacedImage(0, image)])})
        except _RefusedError:
            return
        raise ValueError(
            f"{self._where}: its completions take no images beside tokens: serve the teacher with jaxglue serve, or "
            "name a folder by --teacher"
        )

    def begin(self, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> Future[Float[np.ndarray, " n-1"]]:
        """Begin to score a text with these images; return log-probabilities of its tokens but the first, to come."""
        return self._threads.submit(lambda: np.array(self._score(tokens, images).log_probs, np.float32))

    def _score(self, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> _Scored:
        assert self._form is not None
        scored = self._complete([*map(int, tokens)], {**self._form, **_shown(images)})
        if scored is None or len(scored.log_probs) != len(tokens) - 1 or not np.isfinite(scored.log_probs).all():
            raise ValueError(
                f"{self._where} returned no log-probability for each of the {len(tokens):,} tokens of a text"
            )
        return scored

    def _complete(self, tokens: Sequence[int], form: Mapping[str, Any]) -> _Scored | None:
        body = {"model": self._model, "prompt": tokens, "temperature": 0.0, **form}
        choice = self._ask("completions", body)["choices"][0]
        if "prompt_logprobs" in form:
            listed = choice.get("prompt_logprobs")
            if not listed:
                return None
            found = [each[str(token)] for token, each in zip(tokens[1:], listed[1:], strict=True)]
            return _Scored(
                [each["logprob"] for each in found], [each.get("decoded_token") or "bytes:" for each in found]
            )
        listed = choice.get("logprobs") or {}
        count, values = len(tokens), listed.get("token_logprobs") or []
        if len(values) < count or values[0] is not None:
            return None
        return _Scored(values[1:count], listed["tokens"][1:count])

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a reply; a server that is busy or away is asked again.

        Raises:
            _RefusedError: the server refuses the request.
            ValueError: it is away, or replies with something else than JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, {"Content-Type": "application/json"})
        for attempt in range(_TRIES):
            try:
                with urllib.request.urlopen(request, timeout=self._seconds) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                text = error.read(_LONGEST_ERROR).decode(errors="replace")
                if error.code < 500 and error.code != 429:
                    raise _RefusedError(f"{self._where} refuses {path}: {error.code} {text}") from None
                reason = f"{error.code} {text}"
            except (OSError, ValueError) as error:
                reason = str(error)
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE)
        raise ValueError(f"{self._where}: no answer to {path} ({reason}): is it a server of OpenAI's interface?")

    def close(self) -> None:
        """Let go of requests that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _shown(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return the field of images of a request, each with its first token."""
    parts = []
    for first, image in images:
        assert image.read is not None
        url = f"data:image/png;base64,{b64encode(image.read()).decode()}"  # its bytes tell what it is
        parts.append({"type": "image_url", "image_url": {"url": url}, "token": first})
    return {"images": parts} if parts else {}


class _RefusedError(ValueError):
    """Reports a request that a server refuses."""


class ServedTeachers:
    """Teachers of a run, of which each row has one.

    Args:
        specs: `URL?model=name`, and before it `name=` where there are several.
        seconds: the most time of a server's answer.

    Raises:
        ValueError: a bad specification, or as `ServedTeacher`.
    """

    def __init__(self, specs: Sequence[str], seconds: float):
        found = dict[str | None, tuple[str, str | None]]()
        for spec in specs:
            read = _SPEC.fullmatch(spec)
            if read is None or (read["name"] is None and len(specs) > 1) or read["name"] in found:
                raise ValueError(
                    f"--teacher-server {spec}: expected an address, as http://127.0.0.1:8000/v1?model=Qwen3-8B, or "
                    "where there are several each with a name of its own before it, as math=http://127.0.0.1:8000/v1"
                )
            found[read["name"]] = read["url"], read["model"]
        self._teachers = {name: ServedTeacher(*address, seconds) for name, address in found.items()}

    def check(
        self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, rules: ImageRules | None = None
    ) -> None:
        """Refuse rows without a teacher, and teachers of another vocabulary, as far as a prompt of each shows.

        Those that see no images are refused by a prompt with some, and all by one with a clip of audio.
        """
        checked = set[tuple[str | None, bool]]()
        for prompt in prompts:
            if any(record.grid.is_clip for record in prompt.records):
                raise ValueError(
                    f"{prompt.origin}: servers take no clips of audio beside tokens: name a folder as --teacher"
                )
            if (kind := (self._name(prompt), bool(prompt.records))) not in checked and len(prompt.tokens) > 1:
                checked.add(kind)
                tokens, images = prompt.teacher or prompt.tokens, [*map(Image.of, prompt.records)]
                placed = images_before(tokens, images, rules) if rules is not None else []
                self._teachers[kind[0]].check(tokens, tokenizer, placed)

    def _name(self, prompt: Prompt) -> str | None:
        if None in self._teachers:
            return None
        if (name := prompt.columns.get(TEACHER)) not in self._teachers:
            names = ", ".join(map(str, self._teachers))
            raise ValueError(f"{prompt.origin}: the column teacher must name one of {names}, got {name!r:.100}")
        return name

    def begin(
        self, prompt: Prompt, tokens: Sequence[int], images: Sequence[PlacedImage] = ()
    ) -> Future[Float[np.ndarray, " n-1"]]:
        """Begin to score tokens, with these images among them, by a row's teacher."""
        return self._teachers[self._name(prompt)].begin(tokens, images)

    def close(self) -> None:
        """See `ServedTeacher`."""
        for teacher in self._teachers.values():
            teacher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
