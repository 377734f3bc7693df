"""Measure what is left of an adapter's gain after its merge into four bits, trained for that (--serve-as) or not.

    python benchmarks/serve_as.py --json benchmarks/results/serve_as.json

A Qwen3 of 25 million parameters learns the bytes of Python's standard library; adapters on it learn three other kinds
of text, each with equal steps: in 16 bits, then merged and rounded, and on the grid of each format. The base is in 16
bits, or in the format already, where training is also shown on the levels themselves, without places in their cells.
`--tiny` is a run of seconds without a GPU.
"""

import argparse
import sysconfig
import tempfile
import time
from collections.abc import Iterator
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

from jaxglue.hf.export import quantize_folder
from jaxglue.hf.loading import load_model
from jaxglue.models.linear import Linear
from jaxglue.models.lora import add_lora, linear_layers, merge_served
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import get_part, merge_module
from jaxglue.ops.projection.served import MERGE, ReferenceMerge
from jaxglue.ops.quant.formats import FORMATS
from jaxglue.ops.quant.served import SERVE_AS, ServedKQuant, ServedStored, k_quant_of

STORED = "nvfp4", "nf4"
"""Formats in which a base may be already."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OnLevels(ServedStored):
    """A stored matrix whose values are on their levels, which only a delta of half a step leaves; a pytree."""

    @property
    def matrix(self):
        """See `Served`."""
        return self.stored.dequantize(jnp.float32)


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


class Task:
    """A corpus that adapters learn, each with equal steps."""

    def __init__(self, corpus: np.ndarray, args: argparse.Namespace):
        self._batches, self._args = Batches(corpus, args.rows, args.tokens), args
        self._held_out = self._batches.evaluation(args.eval_batches)

    def load(self, folder: Path, serve_as: str = "none", *, on_levels: bool = False):
        """Return the model of a folder with a new adapter, on a grid or not."""
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        model = load_model(folder, dtype=dtype, quantize="none" if serve_as == "none" else f"served_{serve_as}")
        add_lora(model, LoraConfig(rank=self._args.rank), rngs=nnx.Rngs(0))
        for _, linear in linear_layers(model):
            if on_levels and isinstance(stored := linear.weight.get_value(), ServedStored):
                linear.weight = nnx.Param(OnLevels(stored=stored.stored, seeds=stored.seeds))
        return model

    def train(self, model) -> tuple[Training, dict[str, float]]:
        """Train a model's adapter; return it with its losses before and after, and its seconds."""
        steps = self._args.steps
        training = Training(model, nnx.LoRAParam, steps=steps, learning_rate=self._args.learning_rate)
        before, begun = training.evaluate(self._held_out), time.perf_counter()
        for batch in self._batches.training(0, steps):
            training.step(batch)
        seconds = time.perf_counter() - begun
        return training, {"before": before, "loss": training.evaluate(self._held_out), "seconds": seconds}

    def merged_loss(self, model, trained: Training, kind: str) -> float:
        """Return the loss of a model with a trained adapter once its merge is rounded to a format.

        Scales are those of the merge, or of the base where it is in the format.
        """
        for index in range(len(model.layers)):
            graphdef, _, others = nnx.split(model.layers[index], nnx.LoRAParam, ...)
            model.layers[index] = merge_module(graphdef, get_part(trained.trainable, index), nnx.to_pure_dict(others))
        if any(isinstance(linear.weight.get_value(), ServedStored) for _, linear in linear_layers(model)):
            merge_served(model)
        for path, linear in linear_layers(model):
            if isinstance(linear, Linear) and linear.adapter is not None:
                matrix, adapter = linear.weight[...], linear.adapter
                total = matrix.astype(jnp.float32) + jnp.matmul(adapter.up, adapter.A, precision="highest")
                linear.weight = nnx.Param(rounded(total, kind, f"{path}.weight", len(model.layers), matrix.dtype))
        add_lora(model, LoraConfig(rank=1), rngs=nnx.Rngs(0))  # of no effect: B is zero
        return Training(model, nnx.LoRAParam, steps=1, learning_rate=1.0).evaluate(self._held_out)


def rounded(total: jax.Array, kind: str, name: str, layers: int, dtype) -> jax.Array:
    """Return a matrix rounded to a format."""
    made = FORMATS.get(kind)
    held = ServedKQuant.of(total, k_quant_of(name, layers)) if made is None else made.quantize(total)
    return held.dequantize(dtype)


def measure(folder: Path, name: str, corpus: np.ndarray, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the losses of a task's variants, with the share of the gain in 16 bits that each keeps."""
    task = Task(corpus, args)
    for base in args.bases:
        own = folder if base == "16 bits" else folder.with_name(f"{folder.name}-{base}")
        plain, timed = task.train(task.load(own))
        gain = timed["before"] - timed["loss"]
        row = {"task": name, "base": base, "base's loss": timed["before"], "gain in 16 bits": gain}
        yield row | {"format": "16 bits", "how": "beside the base", "share": 1.0} | timed
        for kind in SERVE_AS if base == "16 bits" else [base]:
            if kind not in args.formats:
                continue
            merged = task.merged_loss(
                task.load(own, *([] if base == "16 bits" else [kind]), on_levels=True), plain, kind
            )
            rows = {"plain merge": {"loss": merged}}
            if base != "16 bits":
                with MERGE.using(ReferenceMerge()):  # kernels have places of their own
                    rows["trained on levels"] = task.train(task.load(own, kind, on_levels=True))[1]
            rows["trained for it"] = task.train(task.load(own, kind))[1]
            for how, found in rows.items():
                share = (row["base's loss"] - found["loss"]) / gain
                yield row | {"format": kind, "how": how, "share": share} | found


def parse() -> argparse.Namespace:
    """Return the flags, with those of `--tiny` in place of the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="transformers", help="an installed package whose sources are a task")
    parser.add_argument("--tasks", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--bases", nargs="+", choices=["16 bits", *STORED], default=["16 bits", *STORED])
    parser.add_argument("--formats", nargs="+", choices=list(SERVE_AS), default=list(SERVE_AS))
    parser.add_argument("--model", type=Path, help="folder of the pretrained model, made if there is none")
    parser.add_argument("--width", type=int, default=512, help="of the model, a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pretrain-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--tiny", action="store_true", help="few steps on few tokens, to see it run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update({"pretrain_steps": 20, "steps": 5, "rows": 2, "tokens": 128, "eval_batches": 1})
        args.width, args.layers = 256, 2
    args.vocabulary = 256
    sizes = {"hidden_size": args.width, "intermediate_size": 2 * args.width, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": args.width // 64, "num_key_value_heads": args.width // 128, "head_dim": 64}
    shape = fp8_quality.shape(False, 256) | sizes | heads
    fp8_quality.shape = lambda tiny, vocabulary: shape
    return args


def main() -> None:
    args = parse()
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        library = sources(Path(sysconfig.get_paths()["stdlib"]), ("site-packages", "test", "tests", "pydoc_data"), 256)
        if not (folder / "config.json").exists():
            print(f"pretrained: {pretrain(folder, library, args)[-1][1]:.4f}", flush=True)
        for kind in STORED:
            if not (stored := folder.with_name(f"{folder.name}-{kind}")).exists():
                quantize_folder(folder, stored, kind)
        found = list(tasks(args.package).items())
        for name, corpus in (found[number - 1] for number in args.tasks):
            for result in measure(folder, name, corpus, args):
                results.append(result)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
                if args.json:
                    write_results(args.json, results)
    rows = [
        {
            "task": result["task"],
            "base": result["base"],
            "format": result["format"],
            "how": result["how"],
            "loss": f"{result['loss']:.4f}",
            "share of the gain": f"{result['share']:.0%}",
        }
        for result in results
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
