"""One process of several: `python distributed_worker.py RANK PORT FOLDER`.

Places its part of the arrays in FOLDER/arrays.npz, runs a step on the mesh of all
processes, and compares what it has of the results with those in the file.
"""

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

    got = jax.jit(step)(*(place(name, spec) for name, spec in SPECS.items()))
    for name, x in zip(RESULTS, got, strict=True):
        for shard in x.addressable_shards:
            want = arrays[name][shard.index]
            np.testing.assert_allclose(
                shard.data, want, rtol=2e-5, atol=2e-5, err_msg=name
            )
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
