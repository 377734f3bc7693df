"""Logits that transformers and PEFT compute of folders, for tests; runs with a Python that has torch."""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(base: str, adapter: str, merged: str, tokens: str, output: str) -> None:
    """Write the logits [2, T, V] of a base with an adapter, and of the merged folder."""
    ids = torch.from_numpy(np.load(tokens))
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (base, merged)]
    models[0] = PeftModel.from_pretrained(models[0], adapter)
    with torch.no_grad():
        np.save(output, np.stack([model.eval()(input_ids=ids).logits[0].numpy() for model in models]))


if __name__ == "__main__":
    main(*sys.argv[1:])
