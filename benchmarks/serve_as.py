"""Measure what is left of an adapter's gain after its merge into four bits, trained for that (--serve-as) or not.

    python benchmarks/serve_as.py --json benchmarks/results/serve_as.json

A Qwen3 of 25 million parameters learns the bytes of Python's standard library; adapters on it learn three other kinds
of text, each with equal steps: in 16 bits, then merged and rounded, and on the grid of each format. `refit` takes its
scales from the merge of each step in place of the base's. `--tiny` is a run of seconds without a GPU.
"""

import argparse
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import fp8_quality
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fp8_quality import Batches, Training, pretrain, sources
from measure import table, write_results

from jaxglue.hf.loading import load_model
from jaxglue.models.linear import Linear
from jaxglue.models.lora import add_lora, linear_layers
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import get_part, merge_module
from jaxglue.ops.quant.formats import FORMATS, register
from jaxglue.ops.quant.nvfp4 import BLOCK
from jaxglue.ops.quant.served import SERVE_AS, ServedFormat, ServedKQuant, ServedNVFP4, k_quant_of

REFIT = "nvfp4, refit"
VARIANTS = (*SERVE_AS, REFIT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RefitNVFP4(ServedNVFP4):
    """NVFP4 whose scales follow the merge; a pytree."""

    def merged(self, delta, dtype):
        """See `Served`."""
        total = self.matrix.astype(jnp.float32) if delta is None else self.matrix.astype(jnp.float32) + delta
        return FORMATS["nvfp4"].quantize(total).dequantize(dtype)


class _Refit(ServedFormat):
    def quantize(self, matrix):
        held = FORMATS["served_nvfp4"].quantize(matrix)
        return RefitNVFP4(matrix=held.matrix, scales=held.scales, divisors=held.divisors)


register(_Refit(REFIT, RefitNVFP4, BLOCK))


def tasks(package: str) -> dict[str, np.ndarray]:
    """Return the bytes of three kinds of text."""
    found = find_spec(package)
    assert found is not None and found.origin is not None, package
    library = Path(sysconfig.get_paths()["stdlib"])
    site = Path(sysconfig.get_paths()["purelib"])
    content = b"\0".join(path.read_bytes() for path in sorted(site.glob("*.dist-info/METADATA")))
    return {
        f"sources of {package}": sources(Path(found.origin).parent, ("test", "tests"), 256),
        "English on Python": np.frombuffer((library / "pydoc_data/topics.py").read_bytes(), np.uint8),
        "packages' descriptions": np.frombuffer(content, np.uint8),
    }


def storage_of(variant: str) -> str:
    """Return the storage in which a variant trains."""
    return "none" if variant == "none" else f"served_{variant}"


def train(
    folder: Path, variant: str, corpus: np.ndarray, args: argparse.Namespace
) -> tuple[Training, float, float, dict]:
    """Train an adapter; return it with its losses before and after, and its seconds a step."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = load_model(folder, dtype=dtype, quantize=storage_of(variant))
    add_lora(model, LoraConfig(rank=args.rank), rngs=nnx.Rngs(0))
    batches = Batches(corpus, args.rows, args.tokens)
    held_out = batches.evaluation(args.eval_batches)
    training = Training(model, nnx.LoRAParam, steps=args.steps, learning_rate=args.learning_rate)
    before, begun = training.evaluate(held_out), time.perf_counter()
    for batch in batches.training(0, args.steps):
        training.step(batch)
    after = training.evaluate(held_out)
    return training, before, after, {"seconds": time.perf_counter() - begun}


def merged_losses(training: Training, folder: Path, corpus: np.ndarray, args: argparse.Namespace) -> dict[str, float]:
    """Return the losses of an adapter trained in 16 bits once its merge is rounded to each format."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    held_out, losses = Batches(corpus, args.rows, args.tokens).evaluation(args.eval_batches), {}
    for kind in SERVE_AS:
        model = load_model(folder, dtype=dtype)
        add_lora(model, LoraConfig(rank=args.rank), rngs=nnx.Rngs(0))
        for index in range(len(model.layers)):
            graphdef, _, others = nnx.split(model.layers[index], nnx.LoRAParam, ...)
            model.layers[index] = merge_module(graphdef, get_part(training.trainable, index), nnx.to_pure_dict(others))
        for path, linear in linear_layers(model):
            assert isinstance(linear, Linear) and linear.adapter is not None
            matrix, name = linear.weight[...], f"{path}.weight"
            total = matrix.astype(jnp.float32) + jnp.matmul(linear.adapter.up, linear.adapter.A, precision="highest")
            if kind == "q4_k_m":
                held = ServedKQuant.of(total, k_quant_of(name, len(model.layers)))
            else:
                held = FORMATS[kind].quantize(total)
            linear.weight = nnx.Param(held.dequantize(matrix.dtype))
            linear.lora_B = nnx.LoRAParam(jnp.zeros_like(linear.lora_B[...]))
        losses[kind] = Training(model, nnx.LoRAParam, steps=1, learning_rate=1.0).evaluate(held_out)
    return losses


def measure(folder: Path, name: str, corpus: np.ndarray, args: argparse.Namespace):
    """Yield the losses of a task's variants, with the share of the gain in 16 bits that each keeps."""
    plain, base, adapted, timed = train(folder, "none", corpus, args)
    row = {"task": name, "base": base, "adapted in 16 bits": adapted}
    yield row | {"format": "16 bits", "trained for it": False, "loss": adapted, "share": 1.0} | timed
    for kind, loss in merged_losses(plain, folder, corpus, args).items():
        share = (base - loss) / (base - adapted)
        yield row | {"format": kind, "trained for it": False, "loss": loss, "share": share}
    for variant in args.variants:
        _, rounded, loss, timed = train(folder, variant, corpus, args)
        share = (base - loss) / (base - adapted)
        trained = {"format": variant, "trained for it": True, "base rounded": rounded, "loss": loss, "share": share}
        yield row | trained | timed


def parse() -> argparse.Namespace:
    """Return the flags, with those of `--tiny` in place of the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="transformers", help="an installed package whose sources are a task")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--pretrain-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tiny", action="store_true", help="few steps on few tokens, to see it run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update({"pretrain_steps": 20, "steps": 5, "rows": 2, "tokens": 128, "eval_batches": 1})
    args.vocabulary, shape = 256, fp8_quality.shape(False, 256)
    if args.tiny:
        shape |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    fp8_quality.shape = lambda tiny, vocabulary: shape
    return args


def main() -> None:
    args = parse()
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        library = sources(Path(sysconfig.get_paths()["stdlib"]), ("site-packages", "test", "tests", "pydoc_data"), 256)
        print(f"pretrained: {pretrain(folder, library, args)[-1][1]:.4f}", flush=True)
        for name, corpus in tasks(args.package).items():
            for result in measure(folder, name, corpus, args):
                results.append(result)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
                if args.json:
                    write_results(args.json, results)
    rows = [
        {
            "task": result["task"],
            "format": result["format"],
            "trained for it": "yes" if result["trained for it"] else "no",
            "loss": f"{result['loss']:.4f}",
            "share of the gain": f"{result['share']:.0%}",
        }
        for result in results
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
