"""Show whether a document's loss depends on the text packed before it: ours, and transformers' packed path.

    python benchmarks/packed_leak.py --peers-python PYTHON --json benchmarks/results/packed_leak.json

A tiny Qwen3.5 of random weights in float32, on the CPU. The same document stands alone, and behind each of several
other documents in a packed row; reported is the largest change of its loss, which rounding alone should cause.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from inputs import make_model
from measure import table, write_results
from shapes import SHAPES

from jaxglue.hf.loading import load_model
from jaxglue.ops.segments import pack_segments

SHAPE, DOCUMENT, NEIGHBORS = "tiny-qwen3.5", 40, 8


def documents() -> list[np.ndarray]:
    """Return the document, and others that may stand before it."""
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[SHAPE]["vocab_size"]
    return [rng.integers(0, vocabulary, DOCUMENT + 7 * i, dtype=np.int32) for i in range(NEIGHBORS + 1)]


def ours(folder: Path, rows: list[list[np.ndarray]]) -> list[float]:
    """Return the loss of each row's last document."""
    model = load_model(folder, dtype=jnp.float32)

    def loss(row: list[np.ndarray]) -> float:
        tokens = np.concatenate(row)
        segments = pack_segments([list(map(len, row))], seq_len=len(tokens))
        logits = model(tokens[None], segments)[0, -len(row[-1]) : -1].astype(jnp.float32)
        targets = jnp.asarray(row[-1][1:])[:, None]
        return -float(jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=1).mean())

    return [loss(row) for row in rows]


def transformers(python: str, folder: Path, rows: list[list[np.ndarray]]) -> dict:
    """Return the same by transformers in another Python, with its versions."""
    script = Path(__file__).parent / "peers" / "packed_leak.py"
    given = json.dumps([[document.tolist() for document in row] for row in rows])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run([python, script, folder], input=given, capture_output=True, text=True, env=environment)
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="a Python with transformers and torch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    document, *others = documents()
    rows = [[document], *([other, document] for other in others)]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(folder, SHAPES[SHAPE] | {"initializer_range": 0.02})
        losses = {"ours": ours(folder, rows)}
        peer = transformers(args.peers_python, folder, rows) if args.peers_python else {"losses": {}}
    losses |= peer.pop("losses")
    results = [
        {"by": name, "alone": alone, "largest change behind another document": max(abs(x - alone) for x in packed)}
        for name, (alone, *packed) in losses.items()
    ]
    print(table(results))
    if args.json:
        write_results(args.json, {"rows": results, "losses": losses, "peer": peer}, gpu="none: the CPU")


if __name__ == "__main__":
    main()
