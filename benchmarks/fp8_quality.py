"""Does LoRA learn as well on frozen weights in FP8 or NF4 as in bf16: the same training, several seeds of each.

    python benchmarks/fp8_quality.py --json benchmarks/results/fp8_quality.json --plot docs/fp8.png

A Qwen3 of 25 million parameters (59 with --vocabulary 65536) learns the bytes of Python's standard library from
scratch; then adapters on it learn another package's sources, held-out parts of which give the loss. `--tiny` is a run
of seconds without a GPU.
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import nnx
from measure import save_figure, table, write_results

from jaxglue.data.batch import Batch
from jaxglue.engine.executor import Executor
from jaxglue.engine.policy import parse_policy
from jaxglue.engine.transfer import commit
from jaxglue.hf.checkpoint import save_tensors
from jaxglue.hf.loading import load_model, random_model
from jaxglue.models import config_from_hf
from jaxglue.models.lora import add_lora
from jaxglue.models.lora_config import LoraConfig
from jaxglue.models.parameters import flatten_names, split_model
from jaxglue.ops.segments import pack_segments
from jaxglue.training.adamw import AdamWOptimizer
from jaxglue.training.config import OptimizerConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Variant(NamedTuple):
    """Formats of frozen weights, and how they are drawn."""

    storage: str
    color: str
    fp8_head: bool = False
    """Multiply the output projection in FP8 too."""


VARIANTS = {
    "bf16": Variant("none", "#9aa3b2"),
    "FP8": Variant("fp8", "#2a6fdb"),
    "FP8 with its head": Variant("fp8", "#1aa179", fp8_head=True),
    "NF4": Variant("nf4", "#e08a1e"),
}


def shape(tiny: bool, vocabulary: int) -> dict:
    """Return the config.json of a Qwen3 whose tokens are bytes, or pairs of bytes."""
    width, feed_forward, layers, heads = (64, 128, 2, 4) if tiny else (512, 1536, 8, 8)
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }


def sources(folder: Path, skipped: tuple[str, ...], vocabulary: int) -> np.ndarray:
    """Return the tokens of a folder's Python files, in a fixed random order."""
    files = [file for file in sorted(folder.rglob("*.py")) if not set(file.relative_to(folder).parts) & set(skipped)]
    order = np.random.default_rng(0).permutation(len(files))
    content = b"\0".join(files[i].read_bytes() for i in order)
    return np.frombuffer(content[: len(content) // 2 * 2], np.uint8 if vocabulary == 256 else np.uint16)


def corpora(package: str, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the standard library and of a package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"--package {package} is not installed: name one that is")
    skipped = ("site-packages", "dist-packages", "test", "tests")
    library = sources(Path(sysconfig.get_paths()["stdlib"]), skipped, vocabulary)
    return library, sources(Path(spec.origin).parent, ("test", "tests"), vocabulary)


class Batches:
    """Random windows of a corpus; the last tenth is held out."""

    def __init__(self, corpus: np.ndarray, rows: int, tokens: int):
        self._train, self._held_out = np.split(corpus, [len(corpus) * 9 // 10])
        self._rows, self._tokens = rows, tokens
        self._segments = pack_segments([[tokens]] * rows, seq_len=tokens)

    def training(self, seed: int, steps: int) -> Iterator[Batch]:
        """Yield the batches of a seed."""
        rng = np.random.default_rng(seed)
        return (self._batch(self._train, rng) for _ in range(steps))

    def evaluation(self, count: int) -> list[Batch]:
        """Return the same held-out batches for everyone, on the device."""
        rng = np.random.default_rng(0)
        return [jax.device_put(self._batch(self._held_out, rng)) for _ in range(count)]

    def _batch(self, corpus: np.ndarray, rng: np.random.Generator) -> Batch:
        starts = rng.integers(0, len(corpus) - self._tokens - 1, self._rows)
        windows = np.stack([corpus[start : start + self._tokens + 1] for start in starts]).astype(np.int32)
        weights = np.ones((self._rows, self._tokens), np.float32)
        return Batch(tokens=windows[:, :-1], targets=windows[:, 1:], loss_weights=weights, segments=self._segments)


class Training:
    """A model that learns, and its loss on held-out batches."""

    def __init__(self, model, trainable_type, *, steps: int, learning_rate: float, fp8_head: bool = False):
        graphdefs, trainable, frozen = split_model(model, trainable_type)
        self.trainable, self.frozen = commit(trainable), commit(frozen)
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        config = replace(model.config, fp8_head=fp8_head)
        self._executor = Executor(graphdefs, config, policy=parse_policy("dots"), dtype=dtype)
        self._optimizer = AdamWOptimizer(OptimizerConfig(learning_rate=learning_rate), steps)
        self._state, self._step = self._optimizer.init(self.trainable), 0

    def step(self, batch: Batch) -> jax.Array:
        """Dispatch a step and return its loss."""
        batch = jax.device_put(batch)
        weight = float(batch.tokens.size)
        loss, gradients = self._executor.loss_and_gradients(self.trainable, self.frozen, [batch], weight)
        self.trainable, self._state, _ = self._optimizer.update(self.trainable, self._state, gradients, self._step)
        self._step += 1
        return loss

    def evaluate(self, batches: list[Batch]) -> float:
        """Return the mean loss of a token, in nats."""
        losses = [self._executor.loss(self.trainable, self.frozen, batch) for batch in batches]
        return float(sum(losses[1:], losses[0])) / sum(batch.tokens.size for batch in batches)

    def run(self, batches: Iterator[Batch], held_out: list[Batch], every: int) -> list[tuple[int, float]]:
        """Train on all batches; return (step, held-out loss), before the first step too."""
        curve = [(0, self.evaluate(held_out))]
        for number, batch in enumerate(batches, 1):
            self.step(batch)
            if number % every == 0:
                curve.append((number, self.evaluate(held_out)))
        return curve


def pretrain(folder: Path, corpus: np.ndarray, args: argparse.Namespace) -> list[tuple[int, float]]:
    """Train a model from scratch, write it in bf16 as a model folder, and return its curve."""
    config = shape(args.tiny, args.vocabulary)
    model = random_model(config_from_hf(config), dtype=jnp.float32)
    batches = Batches(corpus, args.rows, args.tokens)
    training = Training(model, nnx.Param, steps=args.pretrain_steps, learning_rate=1e-3)
    every = max(args.pretrain_steps // 10, 1)
    curve = training.run(batches.training(0, args.pretrain_steps), batches.evaluation(args.eval_batches), every)
    save_tensors(folder, {name: x.astype(jnp.bfloat16) for name, x in flatten_names(training.trainable).items()})
    (folder / "config.json").write_text(json.dumps(config))
    return curve


def fine_tune(folder: Path, label: str, seed: int, corpus: np.ndarray, args: argparse.Namespace) -> dict:
    """Train an adapter on weights of a variant; the seed draws adapter and batches."""
    begun, variant = time.perf_counter(), VARIANTS[label]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = load_model(folder, dtype=dtype, quantize=variant.storage)
    add_lora(model, LoraConfig(rank=16), rngs=nnx.Rngs(seed))
    batches = Batches(corpus, args.rows, args.tokens)
    rate = args.learning_rate
    training = Training(model, nnx.LoRAParam, steps=args.steps, learning_rate=rate, fp8_head=variant.fp8_head)
    every = max(args.steps // 10, 1)
    curve = training.run(batches.training(seed, args.steps), batches.evaluation(args.eval_batches), every)
    result = {"weights": label, "seed": seed, "curve": curve, "loss": curve[-1][1]}
    print(f"{label}, seed {seed}: {curve[0][1]:.4f} → {curve[-1][1]:.4f}", flush=True)
    return result | {"seconds": time.perf_counter() - begun}


def earlier_runs(paths: list[Path]) -> list[dict]:
    """Return the runs of other processes' files, each once."""
    results = [result for path in paths for result in json.loads(path.read_text())["results"]]
    return list({(result["weights"], result.get("seed")): result for result in results}.values())


def summary(results: list[dict]) -> list[dict]:
    """Return the table's rows: mean and spread over the seeds, and the difference to bf16 of the same seeds."""
    reference = {result["seed"]: result["loss"] for result in results if result["weights"] == "bf16"}
    rows = []
    for label in VARIANTS:
        losses = {result["seed"]: result["loss"] for result in results if result["weights"] == label}
        if not losses:
            continue
        apart = [100 * (loss / reference[seed] - 1) for seed, loss in losses.items()]
        spread = max(losses.values()) - min(losses.values())
        rows.append(
            {
                "weights": label,
                "held-out loss": f"{statistics.mean(losses.values()):.4f}",
                "spread of seeds": f"{spread:.4f}",
                "against bf16, same seed": ", ".join(f"{each:+.2f}%" for each in apart),
            }
        )
    return rows


def plot(results: list[dict], path: Path) -> None:
    """Draw every seed's held-out loss, and its difference to that on bf16 weights."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    reference = {result["seed"]: result["curve"] for result in results if result["weights"] == "bf16"}
    for label, variant in VARIANTS.items():
        for number, result in enumerate(result for result in results if result["weights"] == label):
            steps, losses = zip(*result["curve"], strict=True)
            drawn = {"color": variant.color, "linewidth": 1.2, "label": None if number else label}
            left.plot(steps, losses, **drawn)
            if base := reference.get(result["seed"]):
                right.plot(steps, [100 * (y / x - 1) for (_, x), y in zip(base, losses, strict=True)], **drawn)
    left.set_ylabel("held-out loss, nats a token")
    right.set_ylabel("difference to bf16, same seed, %")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("LoRA steps")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save_figure(figure, path, plotted(results))


def plotted(results: list[dict]) -> list:
    """Return what the chart shows."""
    return [[result["weights"], result["seed"], result["curve"]] for result in results if result["weights"] in VARIANTS]


def parse() -> argparse.Namespace:
    """Return the flags, with those of `--tiny` in place of the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="jax", help="an installed package whose sources the adapters learn")
    parser.add_argument("--vocabulary", type=int, choices=(256, 65536), default=256, help="bytes, or pairs of them")
    parser.add_argument("--pretrain-steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--onto", type=Path, nargs="+", default=[], help="files of --json, shown with these runs")
    parser.add_argument("--model", type=Path, help="folder of the pretrained model, made if there is none")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tiny", action="store_true", help="a small model and few steps, to see it run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.tiny:
        small = {"pretrain_steps": 20, "steps": 10, "seeds": 1, "rows": 2, "tokens": 128, "eval_batches": 1}
        vars(args).update(small)
    return args


def main() -> None:
    args = parse()
    library, package = corpora(args.package, args.vocabulary)
    print(f"standard library {len(library):,} tokens, {args.package} {len(package):,} tokens", flush=True)
    results = earlier_runs(args.onto)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        if not results and not (folder / "config.json").exists():
            results.append({"weights": "pretraining", "curve": pretrain(folder, library, args)})
            print(f"pretrained: {results[0]['curve'][-1][1]:.4f}", flush=True)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for label in args.variants:
                results.append(fine_tune(folder, label, seed, package, args))
                if args.json:
                    write_results(args.json, results)
    if args.json:
        write_results(args.json, results)
    runs = [result for result in results if result["weights"] in VARIANTS]
    if args.plot:
        plot(runs, args.plot)
    if any(run["weights"] == "bf16" for run in runs):
        print(table(summary(runs)))


if __name__ == "__main__":
    main()
