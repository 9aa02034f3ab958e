"""Train the model of `train_char_lm.py` on several devices.

    python examples/train_on_mesh.py                       # batch and heads split
    python examples/train_on_mesh.py --context --seq-len 1024     # sequence split

The first way is `jax.jit` alone: the batch is split over one axis of the mesh, heads
and hidden units over the other, and nothing in the model says so. The second is for
sequences too long for one device: inside `jax.shard_map`, `fkl_jax.ring_attention` in
zigzag order takes the place of `fkl_jax.attention`. Both give the losses of one device;
`--compare` shows it. Runs on all GPUs there are, otherwise on 8 devices that share the
CPU.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train_char_lm as lm
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fkl_jax

Loss = Callable[[lm.Params, jax.Array], jax.Array]


def make_mesh(num_splits: int, axis: str, devices: list[jax.Device]) -> Mesh:
    """All devices as ("data", axis), `num_splits` of them along the second."""
    grid = np.asarray(devices).reshape(-1, num_splits)
    return Mesh(grid, ("data", axis), axis_types=(AxisType.Auto,) * 2)


def param_shardings(params: lm.Params, mesh: Mesh) -> Any:
    """Heads and hidden units over the axis "tensor"; what it does not divide, and all
    the rest, on every device."""
    split_axis = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}

    def sharding(path: Any, x: jax.Array) -> NamedSharding:
        axis = split_axis.get(path[-1].key)
        if axis is None or x.shape[axis] % mesh.shape["tensor"]:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*(None,) * axis, "tensor"))

    return jax.tree_util.tree_map_with_path(sharding, params)


def context_parallel_loss(mesh: Mesh, model: lm.ModelConfig) -> Loss:
    """`loss_fn` with the batch over "data" and the sequence over "seq"."""
    num_shards = mesh.shape["seq"]
    attention = functools.partial(fkl_jax.ring_attention, axis_name="seq", zigzag=True)

    def of_part(
        params: lm.Params, tokens: jax.Array, targets: jax.Array, positions: jax.Array
    ) -> jax.Array:
        logits, _ = lm.forward(
            params, tokens, model, positions=positions, attention=attention
        )
        # Parts are equally long, so the mean of their means is the mean.
        return jax.lax.pmean(lm.bits_per_byte(logits, targets), ("data", "seq"))

    parts = P("data", "seq")
    of_parts = jax.shard_map(
        of_part, mesh=mesh, in_specs=(P(), parts, parts, P("seq")), out_specs=P()
    )

    def loss(params: lm.Params, windows: jax.Array) -> jax.Array:
        tokens, targets = fkl_jax.zigzag_permute(
            (windows[:, :-1], windows[:, 1:]), num_shards
        )
        positions = jnp.arange(tokens.shape[1])
        positions = fkl_jax.zigzag_permute(positions, num_shards, axis=0)
        return of_parts(params, tokens, targets, positions)

    return loss


def train(
    text: np.ndarray,
    loss: Loss,
    params: lm.Params,
    batch_sharding: Any,
    config: lm.TrainConfig,
) -> list[float]:
    """The loss of each step; parameters and moments stay where `params` are."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, windows: Any, index: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, windows)
        return *lm.adamw(params, grads, moments, index, config), value

    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    moments = {"mean": zeros(params), "square": zeros(params)}
    rng = np.random.default_rng(config.seed)
    losses = []
    for index in range(config.num_steps):
        windows = jax.device_put(lm.random_windows(text, config, rng), batch_sharding)
        params, moments, value = step(params, moments, windows, jnp.int32(index))
        losses.append(float(value))
    return losses


def train_split(
    text: np.ndarray,
    mesh: Mesh,
    model: lm.ModelConfig,
    config: lm.TrainConfig,
) -> list[float]:
    """Train on a mesh ("data", "tensor") or ("data", "seq"); the loss of each step."""
    params = lm.init_params(jax.random.key(config.seed), model)
    if "seq" in mesh.shape:
        loss = context_parallel_loss(mesh, model)
        params = jax.device_put(params, NamedSharding(mesh, P()))
    else:
        loss = functools.partial(lm.loss_fn, config=model)
        params = jax.device_put(params, param_shardings(params, mesh))
    return train(text, loss, params, NamedSharding(mesh, P("data")), config)


def train_on_one(
    text: np.ndarray, model: lm.ModelConfig, config: lm.TrainConfig
) -> list[float]:
    """The same on the first device."""
    params = lm.init_params(jax.random.key(config.seed), model)
    loss = functools.partial(lm.loss_fn, config=model)
    return train(text, loss, params, jax.devices()[0], config)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the byte-level language model on several devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--context", action="store_true", help="split the sequence, not the heads"
    )
    parser.add_argument(
        "--splits",
        type=int,
        help="of the heads or the sequence, 2 or 4 if left out; the batch is split "
        "over the rest of the devices",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--compare", action="store_true", help="train on one device as well"
    )
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "seq_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    count = len(jax.devices())
    if args.splits is None:
        args.splits = min(count, 4 if args.context else 2)
    if args.splits < 1 or count % args.splits:
        parser.error(f"--splits must divide the number of devices, {count}")
    if args.batch_size % (count // args.splits):
        parser.error(f"--batch-size must be a multiple of {count // args.splits}")
    if args.context and args.seq_len % (2 * args.splits):
        parser.error(f"--seq-len must be a multiple of {2 * args.splits}")
    return args


def main(argv: list[str] | None = None) -> list[float]:
    """Train, print the losses, return them."""
    args = parse_args(argv)
    model = lm.ModelConfig()
    config = lm.TrainConfig(
        num_steps=args.steps,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        num_warmup_steps=5,
    )
    text, _ = lm.load_text(lm.stdlib_folder())
    axis = "seq" if args.context else "tensor"
    mesh = make_mesh(args.splits, axis, jax.devices())
    print(f"{jax.devices()[0].platform}: {dict(mesh.shape)}")
    losses = train_split(text, mesh, model, config)
    print(f"loss, bits per byte: {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")
    if args.compare:
        alone = train_on_one(text, model, config)
        worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        print(f"one device: {alone[-1]:.4f}; largest difference {worst:.1e}")
    return losses


if __name__ == "__main__":
    # Only of the CPU, and only if nothing has used it before.
    jax.config.update("jax_num_cpu_devices", 8)
    main()
