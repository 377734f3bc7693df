"""Reward models as transformers' sequence classification with one label."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jaxglue.data.tokenizer import padding_token
from jaxglue.hf.checkpoint import read_config
from jaxglue.hf.files import write_json

_CLASS = "ForSequenceClassification"


def describe_reward_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Enter class, label and padding token of a reward model into a folder's config.json.

    The class scores the last token that is not the padding token.
    """
    raw = read_config(folder)
    family = "".join(part.capitalize() for part in raw["model_type"].split("_"))
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    padding = {"pad_token_id": padding_token(tokenizer)}
    write_json(folder / "config.json", raw | {"architectures": [family + _CLASS]} | labels | padding)
