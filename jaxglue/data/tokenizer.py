"""Tokenizer loading."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face folder, without network or remote code.

    Raises:
        ValueError: a missing folder or tokenizer, or one without a fast (`tokenizers`) implementation.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"tokenizer: no such folder: {folder}")
    if not any((folder / name).is_file() for name in _FILES):
        raise ValueError(f"no tokenizer in {folder}: expected one of {', '.join(_FILES)}; copy it from the base model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer in {folder} has no tokenizer.json: save it once as a fast tokenizer")
    return tokenizer
