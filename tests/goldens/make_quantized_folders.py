"""Write `nf4_folder/` and `int8_folder/`: a tiny Qwen3 that transformers and bitsandbytes quantized and saved.

Run with torch, transformers and bitsandbytes installed (made with torch 2.13, transformers 5.17 and bitsandbytes 0.50.2
on a CPU):

    TORCHDYNAMO_DISABLE=1 python tests/goldens/make_quantized_folders.py

`nf4_folder/golden.safetensors`: a matrix as it was in both, tokens, and the logits of the NF4 model in float32
(bitsandbytes' int8 rounds activations too). bitsandbytes' PyTorch code is used, see `make_nf4.py`.
"""

import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


def tiny() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.2))
    model.resize_token_embeddings(24)
    return model


def main() -> None:
    tokens = torch.arange(24).reshape(1, 24) * 7 % 24
    model = tiny()
    matrix = model.model.layers[1].mlp.down_proj.weight.detach().clone()
    with tempfile.TemporaryDirectory() as original:
        model.save_pretrained(original)
        for how, options in CONFIGS.items():
            config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
            model = AutoModelForCausalLM.from_pretrained(
                original, quantization_config=config, dtype=torch.float32, device_map="cpu"
            )
            folder = HERE / f"{how}_folder"
            shutil.rmtree(folder, ignore_errors=True)
            model.save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
            if how == "nf4":
                with torch.no_grad():
                    golden = {"tokens": tokens.int(), "logits": model(tokens).logits.float()}
                golden["model.layers.1.mlp.down_proj.weight"] = matrix
                save_file(golden, folder / "golden.safetensors")
            print(how, json.loads((folder / "config.json").read_text())["quantization_config"])


if __name__ == "__main__":
    # The C++ CPU code misses the nearest scale for about one in a thousand.
    with mock.patch("ctypes.cdll.LoadLibrary", side_effect=OSError("not used here")):
        main()
