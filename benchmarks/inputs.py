"""Make benchmark inputs: a Hugging Face folder of random weights in a published shape, and generated chats.

python benchmarks/inputs.py --shape qwen3-8b --output /dev/shm/qwen3-8b --chats 10000
"""

import argparse
import json
import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from shapes import SHAPES

from jaxglue.files.atomic import atomic_folder
from jaxglue.hf.adapter import save_adapter
from jaxglue.hf.experts import checkpoint_layout, part_shape
from jaxglue.hf.tensor_files import INDEX, plan_shards, write_file
from jaxglue.models import build_model, config_from_hf
from jaxglue.models.config import DecoderConfig
from jaxglue.models.family import find_family
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import abstract_parameters, hf_name
from jaxglue.ops.quant.mxfp4 import mxfp4_scale

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON = "the a one of to in is it that this for with on as by from at an be are was or and not we you they he she"


def make_model(folder: Path, config: dict) -> None:
    """Write config.json, bf16 weights (normal, σ = 0.02, unit norms) or MXFP4, and a byte-level BPE tokenizer."""
    unit = 1 - find_family(config["model_type"]).parts.norm.offset
    model = config_from_hf(config)
    parameters = abstract_parameters(nnx.eval_shape(lambda: build_model(model, rngs=nnx.Rngs(0))))
    layout = checkpoint_layout({name: spec.shape for name, spec in parameters.items()}, config)
    specs = {
        name: jax.ShapeDtypeStruct(part_shape(parameters[parameter].shape, index), parameters[parameter].dtype)
        for name, (parameter, index) in layout.items()
    }
    block = (np.random.default_rng(0).standard_normal(2**24, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    largest = max(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    pool = np.resize(
        block, largest // block.itemsize + 4096
    )  # every matrix is a slice of one pool, so only writing takes time

    def weight(name: str) -> np.ndarray:
        spec = specs[name]
        if name.endswith(("linear_attn.norm.weight", "linear_attn.dt_bias")):
            return np.ones(spec.shape, spec.dtype)
        if name.endswith("bias"):
            return np.zeros(spec.shape, spec.dtype)
        if name.endswith("_scales"):
            return np.full(spec.shape, mxfp4_scale(0.02), spec.dtype)
        if len(spec.shape) == 1:
            return np.full(spec.shape, unit, spec.dtype)
        start = zlib.crc32(name.encode()) % 4096  # a different offset per matrix
        if spec.dtype == np.float32:
            return pool[start : start + math.prod(spec.shape)].astype(spec.dtype).reshape(spec.shape)
        values = pool[start:].view(spec.dtype)[: math.prod(spec.shape)].reshape(spec.shape)
        return values * embedding_scale(model) if name.endswith("embed_tokens.weight") else values

    with atomic_folder(folder) as temporary:
        _write_description(temporary, config)
        _write_files(temporary, specs, weight)


def _write_files(folder: Path, specs: dict[str, jax.ShapeDtypeStruct], weight: Callable[[str], np.ndarray]) -> None:
    """Write safetensors files side by side, and their index: one thread fills memory at 1 GB/s on some machines."""
    shards = plan_shards(specs, 2 * 10**9)
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write(file: str, names: list[str]) -> dict[str, str]:
        write_file(folder / file, {name: specs[name] for name in names}, weight)
        return dict.fromkeys(names, file)

    with ThreadPoolExecutor(16) as pool:
        written = list(pool.map(write, files, shards))
    weight_map = {name: file for names in written for name, file in names.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def embedding_scale(config: DecoderConfig) -> ml_dtypes.bfloat16:
    """Return the factor that makes tokens as unlike each other as routers of trained models find them, 1 without any.

    With small embeddings hidden states are a row's mean and the biases, and all tokens go to the same experts.
    """
    alike = config.moe is not None and not config.tie_word_embeddings
    return ml_dtypes.bfloat16(1 / config.initializer_range if alike else 1)


def make_description(folder: Path, config: dict) -> None:
    """Write config.json and the tokenizer alone, for `--random-weights`."""
    with atomic_folder(folder) as temporary:
        _write_description(temporary, config)


def _write_description(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))
    _tokenizer().save_pretrained(folder)


def make_adapter(folder: Path, config: dict, lora: LoraConfig) -> None:
    """Write an initial adapter: A uniform within ±1/√in, B zero."""

    def build():
        model = build_model(config_from_hf(config), rngs=nnx.Rngs(0))
        add_lora(model, lora, rngs=nnx.Rngs(0))
        return model

    variables = nnx.to_flat_state(nnx.state(nnx.eval_shape(build), nnx.LoRAParam))
    shapes = {hf_name(".".join(map(str, path))): variable.shape for path, variable in variables}
    rng = np.random.default_rng(0)

    def matrix(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("lora_B"):
            return np.zeros(shape, np.float32)
        bound = shape[-1] ** -0.5
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    save_adapter(
        folder, {name: matrix(name, shape) for name, shape in shapes.items()}, lora, "", model_type=config["model_type"]
    )


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # slow, and not for shapes
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([message["content"] for chat in _chats(200, seed=1) for message in chat], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_chats(path: Path, count: int, seed: int = 0) -> None:
    """Write chats of one to four exchanges, 64 to about 1,000 tokens each, as JSONL."""
    lines = (json.dumps({"messages": chat}) + "\n" for chat in _chats(count, seed))
    path.write_text("".join(lines), encoding="utf-8")


def _chats(count: int, seed: int):
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnoprstuvw"))
    own = ["".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(800)]
    vocabulary = np.array(_COMMON.split() * 12 + own)
    for _ in range(count):
        exchanges, words = int(rng.integers(1, 5)), int(rng.integers(16, 330))
        asked, told = 2 + words // (4 * exchanges), 2 + words * 3 // (4 * exchanges)
        texts = [[" ".join(rng.choice(vocabulary, n)) for n in (asked, told)] for _ in range(exchanges)]
        yield [
            {"role": role, "content": text}
            for pair in texts
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="decoder layers, by default the published number")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--no-weights", action="store_true", help="config.json and tokenizer alone")
    parser.add_argument("--chats", type=int, default=0, help="chats to write to OUTPUT/../chats.jsonl")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    config = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    (make_description if args.no_weights else make_model)(args.output, config)
    if args.chats:
        make_chats(args.output.parent / "chats.jsonl", args.chats)


if __name__ == "__main__":
    main()
