"""One process of several: `python distributed_worker.py RANK PORT FOLDER`.

Places its part of the arrays in FOLDER/arrays.npz, runs a step on the mesh of all
processes, and compares what it has of the results with those in the file.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fkl_jax

# Batch over the processes, heads over the devices of each.
QKV = P("processes", None, "devices")
SPECS = {
    "query": QKV,
    "key": QKV,
    "value": QKV,
    "slopes": P("devices"),
    "cap": P(),
    "lengths": P("processes"),
}
FLOATS = list(SPECS)[:-1]
RESULTS = ("out", *(f"gradient of {name}" for name in FLOATS))


def step(*args):
    """Return out and the gradients of the floats."""

    def loss(query, key, value, slopes, cap):
        def alibi(s, b, h, q_idx, kv_idx):
            return s - slopes[h] * (q_idx - kv_idx) + 0.1 * b

        out = fkl_jax.attention(
            query, key, value, causal=True, kv_seq_lengths=args[-1],
            score_mod=(alibi, fkl_jax.SoftCap(cap)), implementation="ffi",
        )  # fmt: skip
        return jnp.sum(jnp.sin(out)), out

    wanted = tuple(range(len(FLOATS)))
    (_, out), grads = jax.value_and_grad(loss, wanted, has_aux=True)(*args[:-1])
    return out, *grads


# The sequence over all devices, those of a process next to each other, zigzag.
SEQUENCE = ("processes", "devices")
RING_SPECS = {
    "ring query": P(None, SEQUENCE),
    "ring key": P(None, SEQUENCE),
    "ring value": P(None, SEQUENCE),
    "slopes": P(),
}
RING_RESULTS = ("ring out", *(f"ring gradient of {name}" for name in RING_SPECS))


def ring_step(attention, *args):
    """Return out and the gradients; `attention` sees the arrays in zigzag order."""

    def loss(query, key, value, slopes):
        out = attention(query, key, value, slopes)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*args)
    return out, *grads


def on_one_device(query, key, value, slopes):
    there = functools.partial(fkl_jax.zigzag_permute, num_shards=4)
    back = functools.partial(fkl_jax.zigzag_unpermute, num_shards=4)
    out = fkl_jax.attention(
        *back((query, key, value)), causal=True, score_mod=fkl_jax.ALiBi(slopes)
    )
    return there(out)


def on_mesh(mesh):
    def ring(query, key, value, slopes):
        return fkl_jax.ring_attention(
            query, key, value, axis_name=SEQUENCE, zigzag=True, causal=True,
            score_mod=fkl_jax.ALiBi(slopes), implementation="ffi",
        )  # fmt: skip

    specs = tuple(RING_SPECS.values())
    return jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=specs[0])


def main(rank: int, port: str, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    assert jax.process_count() == 2 and jax.device_count() == 4
    arrays = dict(np.load(f"{folder}/arrays.npz"))
    mesh = jax.make_mesh(
        (2, 2), ("processes", "devices"), axis_types=(AxisType.Auto,) * 2
    )

    def place(name, spec):
        x = arrays[name]
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        )

    def check(step, specs, results):
        got = jax.jit(step)(*(place(name, spec) for name, spec in specs.items()))
        for name, x in zip(results, got, strict=True):
            for shard in x.addressable_shards:
                want = arrays[name][shard.index]
                np.testing.assert_allclose(
                    shard.data, want, rtol=2e-5, atol=2e-5, err_msg=name
                )

    check(step, SPECS, RESULTS)
    check(functools.partial(ring_step, on_mesh(mesh)), RING_SPECS, RING_RESULTS)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
