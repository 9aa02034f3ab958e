"""Arrays of a `Case` on a mesh of CPU devices, and what XLA makes of a call there."""

import dataclasses
import functools
import re

import jax
import numpy as np
from cases import COMPILE_FAST, Case, Problem, call
from jax.sharding import AxisType, PartitionSpec

Axes = tuple[str, ...]

# Axes of parameters that a mod reads at exactly `b` or `h`: those can be divided.
PARAMETER_AXES = {
    "alibi": ["N"],
    "relative_bias": ["N."],
    "own_score_mod": ["BN", ""],
    "alibi_soft_cap_function": ["N", ""],
    "captured_table": ["N."],
    "captured_half_table": ["BN"],
    "captured_full_bias": ["BN.."],
    "prefix_lm_per_batch": ["B"],
    "segment_ids": ["B.", "B."],
    "padding": ["B"],
    "dense_4d": ["BN.."],
    "dense_one_head": ["B..."],
    "captured_threshold": ["N."],
}
_AXES = {
    "query": "*.N.",
    "key": "*.K.",
    "value": "*.K.",
    "bias": "*N..",
    "sinks": "N",
    "scale": "",
    "q_segment_ids": "*.",
    "kv_segment_ids": "*.",
    "q_seq_lengths": "*",
    "kv_seq_lengths": "*",
    "dout": "*.N.",
    "dlse": "*N.",
}
COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    r"|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)


def collectives(compiled) -> list[str]:
    """Return the kinds of the collectives in a compiled program, in order."""
    return COLLECTIVE.findall(compiled.as_text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the axes of a call's arrays lie on a mesh.

    Attributes:
        mesh: name and size of each axis.
        batch: mesh axes of each batch axis.
        heads, kv_heads: mesh axes of query heads, and of key heads.
        lead: mesh axes of the axis that vmap maps over.
        parameters: True if what is read per head and batch element is divided too.
        explicit: the axes of the mesh are explicit.
    """

    mesh: tuple[tuple[str, int], ...] = (("x", 4), ("y", 2))
    batch: tuple[Axes, ...] = (("x",),)
    heads: Axes = ("y",)
    kv_heads: Axes = ()
    lead: Axes = ()
    parameters: bool = False
    explicit: bool = False

    def make_mesh(self) -> jax.sharding.Mesh:
        names, sizes = zip(*self.mesh, strict=True)
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))

    def size(self, axes: Axes) -> int:
        return int(np.prod([dict(self.mesh)[a] for a in axes], dtype=int))

    def spec(self, case: Case, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Of one of the arrays of a case."""
        kind, _, rest = name.partition(".")
        if rest:
            mods = {
                "score": case.score_mods,
                "mask": case.mask_mods,
                "as_score": case.mask_as_score,
            }[kind]
            mod, number = map(int, rest.split("."))
            known = PARAMETER_AXES.get(mods[mod], [])
            letters = known[number] if self.parameters and number < len(known) else ""
            closes = mods[mod].startswith("captured") or "function" in mods[mod]
            if closes and self.explicit and not sharded_arrays_can_be_indexed():
                letters = ""
        elif name == "block_mask":
            letters = "bN.." if len(shape) == 4 else "..."
        elif name in ("q_offset", "kv_offset"):
            letters = "*" if shape else ""
        else:
            letters = _AXES[name]
            if name in ("scale", "sinks") and not self.parameters:
                letters = "." * len(letters)
        letters = letters.replace("*", "01"[: len(case.batch)])
        axes = [self._of(letter) for letter in letters]
        # What is the same for all is nobody's part.
        kept = [
            (a if len(a) > 1 else a[0])
            if a and n % self.size(a) == 0 and n > 1
            else None
            for a, n in zip(axes, shape, strict=False)
        ]
        return PartitionSpec(*kept, *(None for _ in shape[len(kept) :]))

    def _of(self, letter: str) -> Axes:
        if letter in "01":
            return self.batch[int(letter)]
        # Flattened batch: its parts are contiguous if the first axis alone is divided.
        if letter in "Bb":
            return self.batch[0] if self.batch and not any(self.batch[1:]) else ()
        return {"N": self.heads, "K": self.kv_heads}.get(letter, ())


@functools.cache
def sharded_arrays_can_be_indexed() -> bool:
    """True if JAX lets a function index what it closes over, sharded by explicit
    axes."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        array = jax.device_put(np.zeros(2), PartitionSpec("x"))
        try:
            jax.make_jaxpr(lambda k: array[k])(0)
        except Exception as e:
            assert type(e).__name__ == "ShardingTypeError"
            return False
    return True


def arrays_of(problem: Problem) -> tuple[dict, dict, dict]:
    dout, dlse = problem.cotangents
    return problem.floats, problem.others, {"dout": dout, "dlse": dlse}


def make_step(case: Case, implementation: str):
    """Return (floats, others, cotangents) -> (out, lse), gradients."""

    def step(floats, others, cotangents):
        results, vjp = jax.vjp(
            lambda floats: call(case, implementation, floats, others), floats
        )
        return results, vjp((cotangents["dout"], cotangents["dlse"]))[0]

    return step


def compile_step(step, *operands):
    return jax.jit(step).lower(*operands).compile(COMPILE_FAST)


def sums_needed(case: Case, layout: Layout, floats: dict) -> set[tuple[bool, Axes]]:
    """The sums over devices that the gradients need: by mesh axes, those of sinks
    (which are made by XLA) apart."""
    divided = {a for axes in (*layout.batch, layout.heads) for a in axes}
    found = set()
    for name, x in floats.items():
        if name in ("key", "value") and case.num_kv_heads == case.num_q_heads:
            continue  # divided with the query, however they come
        own = set()
        for entry in layout.spec(case, name, x.shape):
            own |= set(entry if isinstance(entry, tuple) else (entry,))
        axes = tuple(sorted(a for a in divided - own if dict(layout.mesh)[a] > 1))
        if axes:
            found.add((name == "sinks", axes))
    return found


def assert_close(got, want, tolerance=2e-5):
    """The two differ by the order of sums only."""

    def one(path, a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = np.max(np.abs(b), initial=1.0, where=np.isfinite(b))
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * size,
            err_msg=jax.tree_util.keystr(path),
        )  # fmt: skip

    jax.tree_util.tree_map_with_path(one, got, want)
