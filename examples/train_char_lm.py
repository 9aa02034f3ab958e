"""Train a byte-level language model on the Python standard library's own sources.

A small decoder-only transformer in plain JAX: grouped-query attention, a soft cap on
every attention score, and a sliding window on every other layer, all of them arguments
of one `fkl_jax.attention` call. No download: the text is the library this interpreter
came with, split into training and validation by file. Afterwards the model writes some
Python of its own through the same operator, reading a key/value cache.

    python examples/train_char_lm.py --output-dir runs/char_lm
    python examples/train_char_lm.py --implementation xla     # compare the final losses
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import fkl_jax

VOCAB_SIZE = 256
Params = dict[str, Any]
Cache = list[tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that shapes the model; hashable, so it can be a static argument."""

    num_layers: int = 4
    model_dim: int = 128
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_dim: int = 384
    window: int = 64
    soft_cap: float = 30.0
    implementation: Literal["ffi", "xla"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and on how much text the model is trained."""

    num_steps: int = 350
    batch_size: int = 16
    seq_len: int = 256
    learning_rate: float = 3e-3
    num_warmup_steps: int = 50
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 50
    num_eval_windows: int = 64


# --- text -----------------------------------------------------------------------------

# Generated tables and test data: large, and nothing like the code around them.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def stdlib_folder() -> pathlib.Path:
    """Folder of the standard library's sources."""
    return pathlib.Path(sysconfig.get_path("stdlib") or os.path.dirname(os.__file__))


def load_text(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the Python files below `folder`: about nine tenths, one tenth.

    A file goes to validation by the hash of its name, so the split stays the same from
    run to run and no file is on both sides.
    """
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(name.parts[:-1]):
            is_validation = zlib.crc32(name.as_posix().encode()) % 10 == 0
            splits[is_validation].append(path.read_bytes())
    train, validation = (np.frombuffer(b"\n".join(s), np.uint8) for s in splits)
    if min(train.size, validation.size) < 100_000:
        raise SystemExit(
            f"train_char_lm: found only {train.size + validation.size} bytes of Python "
            f"sources below {folder}; give another folder of .py files with --text"
        )
    return train, validation


def random_windows(
    text: np.ndarray, config: TrainConfig, rng: np.random.Generator
) -> np.ndarray:
    """(batch_size, seq_len + 1) int32: windows of the text from random places."""
    starts = rng.integers(0, text.size - config.seq_len, config.batch_size)
    return text[starts[:, None] + np.arange(config.seq_len + 1)].astype(np.int32)


def eval_windows(text: np.ndarray, config: TrainConfig) -> Iterator[np.ndarray]:
    """Batches of windows spread evenly over the text, the same at every call."""
    last_start = text.size - config.seq_len - 1
    starts = np.linspace(0, last_start, config.num_eval_windows).astype(np.int64)
    for first in range(0, starts.size, config.batch_size):
        chunk = starts[first : first + config.batch_size]
        yield text[chunk[:, None] + np.arange(config.seq_len + 1)].astype(np.int32)


# --- model ----------------------------------------------------------------------------


def init_params(key: jax.Array, config: ModelConfig) -> Params:
    """Scaled normal weights; projections into the residual stream start smaller."""

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(key, shape) * fan_in**-0.5

    c = config
    depth_scale = (2 * c.num_layers) ** -0.5
    layers = []
    for layer_key in jax.random.split(jax.random.fold_in(key, 1), c.num_layers):
        keys = jax.random.split(layer_key, 6)
        q_dim = c.num_q_heads * c.head_dim
        layers.append(
            {
                "attention_norm": jnp.ones(c.model_dim),
                "query": normal(
                    keys[0], (c.model_dim, c.num_q_heads, c.head_dim), c.model_dim
                ),
                "key": normal(
                    keys[1], (c.model_dim, c.num_kv_heads, c.head_dim), c.model_dim
                ),
                "value": normal(
                    keys[2], (c.model_dim, c.num_kv_heads, c.head_dim), c.model_dim
                ),
                "out": depth_scale
                * normal(keys[3], (c.num_q_heads, c.head_dim, c.model_dim), q_dim),
                "mlp_norm": jnp.ones(c.model_dim),
                "up": normal(keys[4], (c.model_dim, c.mlp_dim), c.model_dim),
                "down": depth_scale
                * normal(keys[5], (c.mlp_dim, c.model_dim), c.mlp_dim),
            }
        )
    return {
        "embedding": normal(key, (VOCAB_SIZE, c.model_dim), c.model_dim),
        "layers": layers,
        "final_norm": jnp.ones(c.model_dim),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotate pairs of features of x (B, T, N, H) by angles proportional to position."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * frequencies  # (T, 1, half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def forward(
    params: Params,
    tokens: jax.Array,  # (B, T) int32
    config: ModelConfig,
    cache: Cache | None = None,
    position: jax.Array | int = 0,
    *,
    positions: jax.Array | None = None,
    attention: Callable[..., jax.Array] = fkl_jax.attention,
) -> tuple[jax.Array, Cache]:
    """Logits (B, T, 256) of the next byte, and the cache with these tokens in it.

    With a cache the tokens stand at `position`, `position + 1`, ... and see what is
    stored before them; slots from `position + T` on are not read. Where the tokens are
    a part of a sequence, `positions` (T,) says which, and `attention` sees the rest.
    """
    if positions is None:
        positions = position + jnp.arange(tokens.shape[1])
    x = params["embedding"][tokens]
    new_cache: Cache = []
    for index, layer in enumerate(params["layers"]):
        h = rms_norm(x, layer["attention_norm"])
        query = rotary(jnp.einsum("btd,dnh->btnh", h, layer["query"]), positions)
        key = rotary(jnp.einsum("btd,dkh->btkh", h, layer["key"]), positions)
        value = jnp.einsum("btd,dkh->btkh", h, layer["value"])
        place: dict[str, Any] = {}
        if cache is not None:
            start = (0, position, 0, 0)
            key = jax.lax.dynamic_update_slice(cache[index][0], key, start)
            value = jax.lax.dynamic_update_slice(cache[index][1], value, start)
            num_used = jnp.full(tokens.shape[0], position + tokens.shape[1], jnp.int32)
            place = {"q_offset": position, "kv_seq_lengths": num_used}
        new_cache.append((key, value))
        is_local = index % 2 == 0
        out = attention(
            query,
            key,
            value,
            causal=True,
            score_mod=fkl_jax.SoftCap(config.soft_cap),
            mask_mod=fkl_jax.SlidingWindow.last(config.window) if is_local else None,
            implementation=config.implementation,
            **place,
        )
        x = x + jnp.einsum("btnh,nhd->btd", out, layer["out"])
        h = rms_norm(x, layer["mlp_norm"])
        x = x + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
    logits = rms_norm(x, params["final_norm"]) @ params["embedding"].T
    return logits, new_cache


def bits_per_byte(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over (B, T) of what it takes to code the targets."""
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
    return -jnp.mean(chosen) / math.log(2)


def loss_fn(params: Params, windows: jax.Array, config: ModelConfig) -> jax.Array:
    """Mean bits per byte over windows (B, T + 1)."""
    logits, _ = forward(params, windows[:, :-1], config)
    return bits_per_byte(logits, windows[:, 1:])


# --- training -------------------------------------------------------------------------


def learning_rate(step: jax.Array, config: TrainConfig) -> jax.Array:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = jnp.minimum(1.0, (step + 1) / config.num_warmup_steps)
    progress = jnp.minimum(1.0, step / config.num_steps)
    cosine = 0.1 + 0.45 * (1 + jnp.cos(jnp.pi * progress))
    return config.learning_rate * warmup * cosine


def adamw(
    params: Params, grads: Params, moments: Params, step: jax.Array, config: TrainConfig
) -> tuple[Params, Params]:
    """One AdamW step on gradients clipped to global norm 1; matrices decay."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
    b1, b2 = 0.9, 0.98
    rate = learning_rate(step, config)
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, moments["mean"], grads)
    square = jax.tree.map(
        lambda s, g: b2 * s + (1 - b2) * g * g, moments["square"], grads
    )

    def update(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        direction = (
            m / (1 - b1 ** (step + 1)) / (jnp.sqrt(s / (1 - b2 ** (step + 1))) + 1e-8)
        )
        decay = config.weight_decay if p.ndim > 1 else 0.0
        return p - rate * (direction + decay * p)

    new_params = jax.tree.map(update, params, mean, square)
    return new_params, {"mean": mean, "square": square}


@functools.partial(
    jax.jit, static_argnames=("model", "config"), donate_argnames=("params", "moments")
)
def train_step(
    params: Params,
    moments: Params,
    windows: jax.Array,
    step: jax.Array,
    *,
    model: ModelConfig,
    config: TrainConfig,
) -> tuple[Params, Params, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, windows, model)
    params, moments = adamw(params, grads, moments, step, config)
    return params, moments, loss


eval_step = jax.jit(loss_fn, static_argnames="config")


def evaluate(
    params: Params, text: np.ndarray, model: ModelConfig, config: TrainConfig
) -> float:
    """Validation loss in bits per byte."""
    losses = [eval_step(params, w, model) for w in eval_windows(text, config)]
    return float(np.mean([float(loss) for loss in losses]))


def train(
    train_text: np.ndarray,
    validation_text: np.ndarray,
    model: ModelConfig,
    config: TrainConfig,
    progress: Any = iter,
) -> tuple[Params, list[float], list[tuple[int, float]]]:
    """Parameters, the loss of each step, and (step, validation loss) pairs.

    `progress` wraps the range of steps; if it is a progress bar the losses are shown.
    """
    rng = np.random.default_rng(config.seed)
    params = init_params(jax.random.key(config.seed), model)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    moments = {"mean": zeros(params), "square": zeros(params)}
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    steps = progress(range(config.num_steps))
    for step in steps:
        windows = random_windows(train_text, config, rng)
        params, moments, loss = train_step(
            params, moments, windows, jnp.int32(step), model=model, config=config
        )
        losses.append(float(loss))
        is_last = step + 1 == config.num_steps
        if (step + 1) % config.eval_every == 0 or is_last:
            validation.append(
                (step + 1, evaluate(params, validation_text, model, config))
            )
        if hasattr(steps, "set_postfix"):
            shown = {"train": f"{losses[-1]:.3f}"}
            if validation:
                shown["validation"] = f"{validation[-1][1]:.3f}"
            steps.set_postfix(shown, refresh=False)
    return params, losses, validation


# --- writing text ---------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("num_new", "model"))
def generate(
    params: Params,
    prompt: jax.Array,  # (T,) int32
    key: jax.Array,
    temperature: jax.Array,
    *,
    num_new: int,
    model: ModelConfig,
) -> jax.Array:
    """`num_new` sampled bytes after the prompt, all in one compiled program."""
    shape = (1, prompt.size + num_new, model.num_kv_heads, model.head_dim)
    cache: Cache = [(jnp.zeros(shape), jnp.zeros(shape))] * model.num_layers
    logits, cache = forward(params, prompt[None], model, cache, jnp.int32(0))

    def step(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        logits, cache = carry
        sample_key = jax.random.fold_in(key, index)
        token = jax.random.categorical(sample_key, logits / temperature)
        logits, cache = forward(
            params, token[None, None], model, cache, prompt.size + index
        )
        return (logits[0, -1], cache), token

    _, tokens = jax.lax.scan(step, (logits[0, -1], cache), jnp.arange(num_new))
    return tokens


def sample_text(
    params: Params, prompt: str, num_new: int, seed: int, model: ModelConfig
) -> str:
    """The prompt with `num_new` more bytes."""
    start = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    tokens = generate(
        params,
        start,
        jax.random.key(seed),
        jnp.float32(0.7),
        num_new=num_new,
        model=model,
    )
    return prompt + np.asarray(tokens, np.uint8).tobytes().decode(errors="replace")


# --- command line ---------------------------------------------------------------------


def plot_losses(
    path: pathlib.Path, losses: list[float], validation: list[tuple[int, float]]
) -> None:
    """Write training and validation loss over steps as a PNG."""
    # Figure, not pyplot: no display, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training")
    axes.plot(*zip(*validation, strict=True), marker="o", label="validation")
    axes.set(xlabel="step", ylabel="bits per byte", title="Byte-level language model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = TrainConfig()
    parser.add_argument(
        "--implementation",
        choices=("ffi", "xla"),
        help="attention backend; left out, the library chooses",
    )
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--text", type=pathlib.Path, default=stdlib_folder())
    parser.add_argument(
        "--output-dir", type=pathlib.Path, default=pathlib.Path("runs/char_lm")
    )
    parser.add_argument("--prompt", default="class ", help="start of the sample")
    parser.add_argument("--sample-bytes", type=int, default=600)
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "seq_len", "sample_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, report, write plot, sample and metrics; return the metrics."""
    args = parse_args(argv)
    try:
        # Here and in plot_losses, so that importing this file needs neither.
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise SystemExit(
            f'train_char_lm: {error}; the extras are in: pip install ".[examples]"'
        ) from None

    model = ModelConfig(implementation=args.implementation)
    config = TrainConfig(
        num_steps=args.steps,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    train_text, validation_text = load_text(args.text)
    print(
        f"text: {train_text.size / 1e6:.1f} MB for training, "
        f"{validation_text.size / 1e6:.1f} MB for validation, from {args.text}"
    )
    print(
        f"fkl_jax {fkl_jax.__version__}, jax {jax.__version__} on "
        f"{jax.default_backend()}, implementation={args.implementation or 'automatic'}"
    )
    start = time.perf_counter()
    params, losses, validation = train(
        train_text,
        validation_text,
        model,
        config,
        progress=functools.partial(tqdm, unit="step", desc="training"),
    )
    text = sample_text(params, args.prompt, args.sample_bytes, args.seed, model)
    seconds = time.perf_counter() - start

    metrics = {
        "implementation": args.implementation,
        "steps": config.num_steps,
        "seed": config.seed,
        "train_bits_per_byte": float(np.mean(losses[-20:])),
        "validation_bits_per_byte": validation[-1][1],
        "seconds": seconds,
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    plot_losses(args.output_dir / "loss.png", losses, validation)
    (args.output_dir / "sample.txt").write_text(text, encoding="utf-8")
    (args.output_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(f"\n--- sample ---\n{text}\n--------------")
    print(f"wrote loss.png, sample.txt and metrics.json to {args.output_dir}")
    print(
        f"final loss, bits per byte: training {metrics['train_bits_per_byte']:.4f} "
        f"(last 20 steps), validation {metrics['validation_bits_per_byte']:.4f}; "
        f"{config.num_steps} steps in {seconds:.0f} s"
    )
    return metrics


if __name__ == "__main__":
    main()
