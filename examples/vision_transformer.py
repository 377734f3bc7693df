"""Train a vision transformer of plain Flax modules layer by layer, with the layers' inputs offloaded to host memory.

python examples/vision_transformer.py
"""

import jax
import numpy as np
import optax
from flax import nnx

from jaxglue import LayerStack

SIZE, PATCH, WIDTH, HEADS, CLASSES = 8, 2, 32, 4, 4


class Patches(nnx.Module):
    """Split images into patches, project them and add positions."""

    def __init__(self, rngs: nnx.Rngs):
        count = (SIZE // PATCH) ** 2
        self.project = nnx.Linear(PATCH * PATCH, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, WIDTH)))

    def __call__(self, images):
        """Map images [B, SIZE, SIZE] to tokens [B, patches, WIDTH]."""
        grid = images.reshape(-1, SIZE // PATCH, PATCH, SIZE // PATCH, PATCH).swapaxes(2, 3)
        return self.project(grid.reshape(len(images), -1, PATCH * PATCH)) + self.positions[...]


class Block(nnx.Module):
    """Attention over all patches and a feed-forward, each behind a norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        """Map tokens to tokens [B, patches, WIDTH]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Classifier(nnx.Module):
    """Norm, mean over patches, logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        """Map tokens [B, patches, WIDTH] to logits [B, CLASSES]."""
        return self.logits(self.norm(x).mean(1))


def make_model(depth: int, seed: int = 0) -> tuple:
    """Build the modules; return the functions entry, block and loss, and their parameters."""
    rngs = nnx.Rngs(seed)
    patches, head = nnx.split(Patches(rngs)), nnx.split(Classifier(rngs))
    blocks = [nnx.split(Block(rngs), nnx.Param, ...) for _ in range(depth)]
    (graph, _, rest), *_ = blocks  # equal for all blocks

    def entry(params, batch, key):
        return nnx.merge(patches[0], params)(batch["images"]), None

    def block(params, x, context, key):
        return nnx.merge(graph, params, rest)(x)

    def loss(params, x, batch):
        logits = nnx.merge(head[0], params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).sum()

    params = {"entry": patches[1], "layers": [params for _, params, _ in blocks], "head": head[1]}
    return entry, block, loss, params


def draw_images(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Draw images of a bright row, column, diagonal or nothing, in noise."""
    images, labels = rng.normal(0, 0.3, (count, SIZE, SIZE)), rng.integers(0, CLASSES, count)
    for image, label, line in zip(images, labels, rng.integers(0, SIZE, count), strict=True):
        if label < 2:
            (image if label == 0 else image.T)[line] += 1
        elif label == 2:
            image[np.arange(SIZE), (np.arange(SIZE) + line) % SIZE] += 1
    return {"images": images.astype(np.float32), "labels": labels}


def train(steps: int = 100, *, depth: int = 6, policy: str = "offload", batch: int = 64) -> list[float]:
    """Train on new images in every step; return the mean losses."""
    rng = np.random.default_rng(0)
    entry, block, loss_sum, params = make_model(depth)
    stack = LayerStack(entry, [block] * depth, loss_sum, policy=policy)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    losses = []
    for _ in range(steps):
        loss, gradients = stack.loss_and_gradients(params, [draw_images(rng, batch)], batch)
        params, state = update(gradients, state, params)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train(), start=1):
        if step == 1 or step % 10 == 0:
            print(f"step {step}: loss {loss:.4f}")
