"""Train a model of your own, with a loop of your own, on a mesh: `python examples/own_model.py`.

The model says for each weight which dims it reads and writes; the plan says which dim lies on which mesh axis.
Nothing else is needed. A laptop plays the eight devices.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpp

NUM_FEATURES, NUM_HIDDEN, NUM_CLASSES = 16, 64, 4


class Classifier(nnx.Module):
    """Features to classes through one hidden layer; ``features`` and ``classes`` are dims of its own."""

    def __init__(self, rngs: nnx.Rngs):
        """Draw the weights."""
        up = jax.random.normal(rngs.params(), (NUM_FEATURES, NUM_HIDDEN)) / NUM_FEATURES**0.5
        down = jax.random.normal(rngs.params(), (NUM_HIDDEN, NUM_CLASSES)) / NUM_HIDDEN**0.5
        self.up = nnx.Param(up, dims="features -> mlp")
        self.bias = nnx.Param(jnp.zeros(NUM_HIDDEN), dims="-> mlp")
        self.down = nnx.Param(down, dims="mlp -> classes")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits ``[batch, classes]``."""
        return jax.nn.relu(x @ self.up + self.bias) @ self.down


def loss(model: Classifier, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy and the number of examples."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])
    return losses.sum(), jnp.float32(losses.size)


def batches(num_batches: int, batch_size: int = 64):
    """Draw points round one centre per class."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(NUM_CLASSES, NUM_FEATURES))
    for _ in range(num_batches):
        label = draw.integers(NUM_CLASSES, size=batch_size)
        noise = draw.normal(size=(batch_size, NUM_FEATURES))
        yield {"x": (centres[label] + noise).astype(np.float32), "label": label.astype(np.int32)}


def main(mesh: str = "data:2 fsdp:2 tensor:2") -> None:
    """Train for thirty steps on a mesh and print how far the loss fell."""
    rules = {"features": ("fsdp",)} if "fsdp" in mesh else {}  # split as the schemes split embed
    plan = jaxpp.Plan(mesh=mesh, dims=("features", "classes"), rules=rules)
    state, step = jaxpp.make_train_step(Classifier(nnx.Rngs(0)), optax.adam(1e-2), plan, loss=loss)
    found = []
    for batch in batches(30):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    up = state.params["up"].get_value()
    shapes = f"up {up.shape}, per device {up.addressable_shards[0].data.shape}"
    print(f"mesh {mesh}: loss {found[0]:.6f} -> {found[-1]:.6f} in {len(found)} steps; {shapes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
