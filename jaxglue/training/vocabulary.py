"""The vocabulary of a run: its tokenizer, perhaps with new tokens, the rows of its model, and its stop tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from jaxglue.data.tokenizer import known_tokens
from jaxglue.files.regular_file import read_regular_text
from jaxglue.hf.adapter import Adapter
from jaxglue.hf.serving import has_tokenizer, load_own_tokenizer, stop_tokens
from jaxglue.models.config import DecoderConfig

_MULTIPLE = 64
"""Rows of a grown vocabulary are a multiple of this, for matmuls and for sharding."""
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A run's tokenizer, and the rows of its model that the base lacks or does not use."""

    tokenizer: PreTrainedTokenizerBase
    base_size: int
    """Rows of the base's embedding."""
    size: int
    """Rows in this run."""
    new: tuple[int, ...] = ()
    """Ids of the tokens of --new-tokens."""

    @property
    def new_rows(self) -> tuple[int, ...]:
        """Return the rows that train as new tokens do, in order: theirs, and those that the base lacks."""
        return tuple(sorted({*self.new, *range(self.base_size, self.size)})) if self.new else ()

    @property
    def changes(self) -> bool:
        """Tell whether the run's tokenizer or number of tokens differs from the base's."""
        return bool(self.new) or self.size > self.base_size


def read_vocabulary(
    folder: Path,
    new_tokens: Path | None,
    model: DecoderConfig,
    adapter: Adapter | None,
    other: Path | None = None,
) -> Vocabulary:
    """Return the vocabulary of a run.

    One that trains on from an adapter has that adapter's tokenizer, where it brings one and no other is named.

    Args:
        folder: of the base.
        new_tokens: file of tokens to add; None for none.
        model: the base's architecture.
        adapter: to train on from, if there is one.
        other: folder of another tokenizer than the base's, if there is one.

    Raises:
        ValueError: a bad tokenizer or file of tokens.
    """
    base = size = model.vocab_size
    if other is None:
        tokenizer = load_own_tokenizer(folder, adapter.folder if adapter else None)
    else:
        tokenizer = _load_other(other, size)
    if adapter is not None and adapter.trains_vocabulary:
        return Vocabulary(tokenizer=tokenizer, base_size=base, size=max(size, adapter.vocab_size))
    if new_tokens is None:
        return Vocabulary(tokenizer=tokenizer, base_size=base, size=size)
    new = add_tokens(tokenizer, new_tokens)
    if max(new) >= size:
        size = -(-(max(new) + 1) // _MULTIPLE) * _MULTIPLE
    return Vocabulary(tokenizer=tokenizer, base_size=base, size=size, new=new)


def _load_other(folder: Path, size: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of another folder, whose tokens a model of this vocabulary must have."""
    if not has_tokenizer(folder):
        raise ValueError(f"--tokenizer {folder}: it has no tokenizer.json: name a folder with one")
    tokenizer = load_own_tokenizer(folder)
    if (largest := max(tokenizer.get_vocab().values())) >= size:
        raise ValueError(
            f"--tokenizer {folder}: its token {largest} is beyond the model's {size:,} rows: use the model's own, and "
            "add tokens with --new-tokens"
        )
    return tokenizer


def run_stops(
    tokenizer: PreTrainedTokenizerBase, folder: Path, adapter: Path | None, named: Sequence[str]
) -> frozenset[int]:
    """Return the tokens at which a trained model's answers end.

    Args:
        tokenizer: of the run.
        folder: of the base.
        adapter: folder of the one to train on from, if there is one.
        named: by --stop-tokens.
    """
    return stop_tokens(tokenizer, folder, adapter).union(known_tokens(tokenizer, "stop_tokens", named))


def add_tokens(tokenizer: PreTrainedTokenizerBase, path: Path) -> tuple[int, ...]:
    """Add a file's tokens, one a line, to a tokenizer; return their ids.

    Raises:
        ValueError: no such file, none in it, one that is there twice, or one that the tokenizer has already.
    """
    tokens = _read_lines(path)
    known = tokenizer.get_vocab()
    if present := [token for token in tokens if token in known]:
        raise ValueError(f"--new-tokens {path}: the tokenizer already has {', '.join(present[:_SHOWN])}: remove them")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    grown = tokenizer.get_vocab()
    ids = tuple(grown[token] for token in tokens)
    if len(set(ids)) != len(tokens) or set(ids) & set(known.values()):
        raise ValueError(f"--new-tokens {path}: the tokenizer did not give each token an id of its own")
    return ids


def _read_lines(path: Path) -> list[str]:
    try:
        tokens = [line for line in read_regular_text(path).split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--new-tokens {path}: {error}: expected a text file with a token a line") from None
    if not tokens:
        raise ValueError(f"--new-tokens {path} is empty: expected a token a line")
    if padded := [token for token in tokens if token != token.strip()]:
        raise ValueError(f"--new-tokens {path}: {padded[0]!r} begins or ends with a space: remove it")
    if twice := next((token for token, count in Counter(tokens).items() if count > 1), None):
        raise ValueError(f"--new-tokens {path} has {twice!r:.100} twice: remove one")
    return tokens
