"""Ring and Ulysses attention on 8 CPU devices against the oracle and one device."""

import collections
import dataclasses
import functools

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMPILE_FAST, Case, arguments, call, check, make_problem, poisoned
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fkl_jax
from fkl_jax import _primitives, _ring

KINDS = ("ring", "zigzag", "ulysses")


def make_mesh(
    *shape: int, names=("seq",), devices=None, axis_type=AxisType.Auto
) -> jax.sharding.Mesh:
    devices = (devices or jax.devices("cpu"))[: int(np.prod(shape))]
    grid = np.asarray(devices).reshape(shape)
    return jax.sharding.Mesh(grid, names, axis_types=(axis_type,) * len(shape))


def function_of(kind: str):
    if kind == "ulysses":
        return fkl_jax.ulysses_attention
    return functools.partial(fkl_jax.ring_attention, zigzag=kind == "zigzag")


def sequence_axis(name: str) -> int | None:
    """The axis of an argument that is split over the devices."""
    axes = {"query": -3, "key": -3, "value": -3, "out": -3, "lse": -1}
    axes |= {"q_segment_ids": -1, "kv_segment_ids": -1, "block_mask": -2, "bias": -2}
    return axes.get(name)


def split(name: str, x, num_rows: int) -> P:
    axis = sequence_axis(name)
    if axis is None or (name in ("bias", "block_mask") and x.shape[axis] != num_rows):
        return P()
    entries = [None] * x.ndim
    entries[axis] = "seq"
    return P(*entries)


def parallel(case: Case, kind: str, mesh, implementation, check_vma=True, **options):
    """Return (floats, others) -> (out, lse) of whole arrays, split over the mesh."""
    n = mesh.shape["seq"]

    def reorder(name, x, spec, change):
        return change(x, n, axis=sequence_axis(name)) if "seq" in spec else x

    def run(floats, others):
        rows = {
            "bias": case.q_seq_len,
            "block_mask": -(-case.q_seq_len // case.block_q),
        }
        specs, arrays = [], []
        for arguments_ in (floats, others):
            named = {
                name: split(name, x, rows.get(name, 0))
                for name, x in arguments_.items()
            }
            specs.append(named)
            arrays.append(
                {
                    name: reorder(name, x, named[name], fkl_jax.zigzag_permute)
                    if kind == "zigzag"
                    else x
                    for name, x in arguments_.items()
                }
            )

        def body(floats, others):
            return function_of(kind)(
                floats["query"],
                floats["key"],
                floats["value"],
                axis_name="seq",
                **arguments(case, floats, others),
                return_lse=True,
                implementation=implementation,
            )

        lead = (None,) * len(case.batch)
        out_specs = (P(*lead, "seq"), P(*lead, None, "seq"))
        out, lse = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=out_specs,
            check_vma=check_vma,
            **options,
        )(*arrays)
        if kind == "zigzag":
            out = reorder("out", out, out_specs[0], fkl_jax.zigzag_unpermute)
            lse = reorder("lse", lse, out_specs[1], fkl_jax.zigzag_unpermute)
        return out, lse

    return run


def check_parallel(
    case: Case, kind: str, num_devices: int, implementation, check_vma, devices=None
):
    """Compare results and gradients for whole arrays with the oracle."""
    problem = make_problem(case)
    mesh = make_mesh(num_devices, devices=devices)
    run = parallel(case, kind, mesh, implementation, check_vma)

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def step(floats, others, cotangents):
        results, vjp = jax.vjp(lambda floats: run(floats, others), floats)
        return results, vjp(cotangents)[0]

    floats = poisoned(problem) if case.poison else problem.floats
    operands = jax.tree.map(jnp.asarray, (floats, problem.others, problem.cotangents))
    check(problem, jax.tree.map(np.asarray, step(*operands)))


# --------------------------------------------------------------------- random features

COMPILED_MODS = sorted(k for k, e in catalogue.SCORE_MODS.items() if not e.refused)


@st.composite
def configurations(draw):
    """Draw a case whose lengths a number of devices divides, and how to split it."""
    kind = draw(st.sampled_from(KINDS))
    num_devices = draw(st.sampled_from([2, 3, 4, 8]))
    chunk_q, chunk_kv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    equal = draw(st.booleans())
    pieces = 2 * num_devices if kind == "zigzag" else num_devices
    q_seq_len = pieces * chunk_q
    kv_seq_len = q_seq_len if equal else pieces * chunk_kv
    if kind == "ulysses":
        num_kv_heads = draw(st.sampled_from([1, 2, num_devices]))
        group = num_devices * draw(st.integers(1, 2))
    else:
        num_kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    offsets = draw(st.sampled_from([None, None, "scalar", "batch"]))
    alignments = [False, "top_left", "bottom_right"] + [True] * equal
    causal = draw(st.sampled_from([False, True, True] if offsets else alignments))

    def some(names, most):
        return tuple(draw(st.lists(st.sampled_from(names), max_size=most)))

    def divisor(n):
        return draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))

    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16"]))
    case = Case(
        batch=draw(st.sampled_from([(), (2,), (2, 2)])),
        q_seq_len=q_seq_len,
        kv_seq_len=kv_seq_len,
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([3, 8, 16])),
        value_head_dim=draw(st.sampled_from([1, 8])),
        dtype=dtype,
        causal=causal,
        scale=draw(st.sampled_from([None, 0.25])),
        bias=draw(st.sampled_from([None, None, "-", "BNTS", "NTS", "TS", "NS", "BT"])),
        bias_dtype=draw(st.sampled_from(["float32", dtype])),
        score_mods=some(COMPILED_MODS, 2),
        mask_mods=some(sorted(catalogue.MASK_MODS), 2),
        mask_as_score=some(["causal", "window", "dense_4d"], 1),
        block_mask=draw(
            st.sampled_from([None, None, "holes", "per_head", "one_head", "causal"])
        ),
        block_q=divisor(chunk_q),
        block_kv=divisor(chunk_kv if not equal else chunk_q),
        segment_ids=draw(st.sampled_from([False, False, True])),
        lengths=draw(st.sampled_from(["", "", "q", "k", "qk"])),
        offsets=offsets,
        sinks=draw(st.booleans()),
        poison=draw(st.booleans()),
        cotangents=draw(st.sampled_from(["both", "both", "out", "lse"])),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, kind, num_devices, draw(st.booleans())


def _sweep(examples: int, part: int, implementation: str):
    @seed(part)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(configuration=configurations())
    def test(configuration):
        case, kind, num_devices, check_vma = configuration
        check_parallel(case, kind, num_devices, implementation, check_vma)

    return test


test_random_features = _sweep(10, 0, "ffi")
for _part in range(10):
    globals()[f"test_many_random_features_{_part}"] = pytest.mark.long(
        _sweep(60, 100 + _part, "xla" if _part % 3 == 2 else "ffi")
    )


# ------------------------------------------------------------------ chosen features

FULL = Case(
    q_seq_len=32,
    kv_seq_len=32,
    head_dim=8,
    value_head_dim=8,
    num_q_heads=4,
    num_kv_heads=2,
    causal=True,
    sinks=True,
    segment_ids=True,
    lengths="qk",
    bias="NTS",
    score_mods=("alibi_soft_cap_function", "relative_bias"),
    mask_mods=("window_left_only",),
    seed=3,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_many_features_at_once(kind, check_vma):
    check_parallel(FULL, kind, 4, "ffi", check_vma)


def test_many_features_at_once_in_plain_jax():
    check_parallel(FULL, "ring", 2, "xla", check_vma=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_many_features_at_once_on_gpus(kind):
    """On as many GPUs as there are; on one it is `attention`."""
    count = {1: 1, 2: 2, 3: 2}.get(len(jax.devices("cuda")), 4)
    check_parallel(FULL, kind, count, "ffi", True, jax.devices("cuda"))


def test_segments_cross_devices():
    """One document over all devices, one within a device, padding at the end."""
    ids = np.repeat([0, 1, 2, -1], [19, 2, 8, 3])[None].astype(np.int32)
    case = Case(batch=(1,), q_seq_len=32, kv_seq_len=32, segment_ids=True, causal=True)
    problem = make_problem(case)
    floats = jax.tree.map(jnp.asarray, problem.floats)
    others = {"q_segment_ids": ids, "kv_segment_ids": ids}
    for kind in KINDS:
        run = parallel(case, kind, make_mesh(4), "ffi")
        for got, want in zip(
            jax.jit(run)(floats, others), call(case, "ffi", floats, others), strict=True
        ):
            assert_close(got, want)


def assert_close(got, want, atol=2e-5):
    np.testing.assert_allclose(got, want, atol=atol, rtol=1e-5)


def loss_of(run, problem):
    """Return a scalar function of the float operands, with out and LSE in it."""
    dout, dlse = problem.cotangents

    def loss(floats, others):
        out, lse = run(floats, others)
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out) * dout) + jnp.sum(lse**2 * dlse)

    return loss


def one_device(case):
    return functools.partial(call, case, "ffi")


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_axis_of_size_one_is_attention(kind):
    problem = make_problem(FULL)
    got = jax.jit(parallel(FULL, kind, make_mesh(1), "ffi"))(
        problem.floats, problem.others
    )
    want = jax.jit(one_device(FULL))(problem.floats, problem.others)
    jax.tree.map(np.testing.assert_array_equal, got, want)


SMALL = Case(
    q_seq_len=16,
    kv_seq_len=16,
    head_dim=8,
    value_head_dim=8,
    causal=True,
    score_mods=("alibi",),
    sinks=True,
)


@pytest.mark.parametrize("kind", ["zigzag", "ulysses"])
def test_scan_over_layers_with_remat(kind):
    """Nothing is recomputed by the kernels if out and LSE are saved by name."""
    problem = make_problem(SMALL)
    policy = jax.checkpoint_policies.save_only_these_names("fkl_out", "fkl_lse")

    def layers(run):
        def loss(floats):
            @functools.partial(jax.checkpoint, policy=policy)
            def layer(query, slopes):
                out, _ = run(floats | {"query": query, "score.0.0": slopes}, {})
                return query + out, None

            slopes = jnp.stack([floats["score.0.0"] * k for k in (1, 2, 3)])
            return jnp.sum(jax.lax.scan(layer, floats["query"], slopes)[0] ** 2)

        return jax.jit(jax.value_and_grad(loss))(problem.floats)

    got = layers(parallel(SMALL, kind, make_mesh(4), "ffi"))
    jax.tree.map(assert_close, got, layers(one_device(SMALL)))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind):
    """Over some operands and not over others, among them what decides dead steps."""
    problem = make_problem(SMALL)
    rng = np.random.default_rng(0)
    query = rng.standard_normal((3, *problem.floats["query"].shape)).astype(np.float32)
    sinks = rng.standard_normal((3, 4)).astype(np.float32)
    lengths = np.asarray([[16, 3], [0, 5], [9, 9]], np.int32)

    def mapped(run):
        loss = loss_of(run, problem)

        def one(query, sinks, lengths):
            floats = problem.floats | {"query": query, "sinks": sinks}
            return jax.value_and_grad(loss)(floats, {"kv_seq_lengths": lengths})

        return jax.jit(jax.vmap(one))(query, sinks, lengths)

    case_run = parallel(SMALL, kind, make_mesh(4), "ffi")
    jax.tree.map(assert_close, mapped(case_run), mapped(one_device(SMALL)))


@pytest.mark.backends("ffi", "cuda")
def test_ring_over_a_vmapped_axis(backend):
    """The axis may be that of a vmap, gradients inside: a ring on one device."""
    heads = zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2), strict=True)
    x = tuple(jax.random.normal(key, (4, 2, 8, n, 8)) for key, n in heads)

    def loss(attention):
        def of(q, k, v):
            out = attention(
                q, k, v, causal=True, score_mod=fkl_jax.SoftCap(2.0),
                implementation=backend,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out))

        return jax.grad(of, (0, 1, 2))

    def whole(x):
        return tuple(jnp.concatenate(list(a), axis=1) for a in x)

    ring = loss(functools.partial(fkl_jax.ring_attention, axis_name="seq"))
    got = whole(jax.jit(jax.vmap(ring, axis_name="seq"))(*x))
    want = jax.jit(loss(fkl_jax.attention))(*whole(x))
    jax.tree.map(assert_close, got, want)


def test_batch_over_another_axis_and_sequence_over_two():
    """The sequence over two axes of the mesh, the batch over a third; parameters the
    same everywhere; with check_vma on, the gradient is taken inside as well."""
    mesh = make_mesh(2, 2, 2, names=("data", "outer", "inner"))
    problem = make_problem(SMALL)
    x = {k: jnp.asarray(v) for k, v in problem.floats.items()}
    spec = P("data", ("outer", "inner"))
    specs = {k: spec if v.ndim == 4 else P() for k, v in x.items()}

    def loss(attention):
        def of(x):
            out = attention(
                x["query"], x["key"], x["value"], causal=True, sinks=x["sinks"],
                score_mod=fkl_jax.ALiBi(x["score.0.0"]), implementation="ffi",
            )  # fmt: skip
            return jnp.sum(out**2)

        return of

    of_part = loss(
        functools.partial(fkl_jax.ring_attention, axis_name=("outer", "inner"))
    )

    def total(x):
        return jax.lax.psum(of_part(x), ("data", "outer", "inner"))

    outside = jax.grad(
        lambda x: jax.shard_map(total, mesh=mesh, in_specs=(specs,), out_specs=P())(x)
    )
    inside = jax.shard_map(
        jax.grad(of_part), mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    want = jax.jit(jax.grad(loss(fkl_jax.attention)))(x)
    jax.tree.map(assert_close, jax.jit(outside)(x), want)
    jax.tree.map(assert_close, jax.jit(inside)(x), want)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_that_are_not_manual(kind, axis_type):
    """A shard_map over the sequence alone; the batch stays divided over another axis,
    explicit or not."""
    mesh = make_mesh(2, 4, names=("data", "seq"), axis_type=axis_type)
    problem = make_problem(SMALL)
    run = parallel(SMALL, kind, mesh, "ffi", axis_names={"seq"})

    def place(x):
        spec = P("data", "seq") if x.ndim == 4 else P()
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss_of(run, problem)))
        got = step(jax.tree.map(place, problem.floats), {})
    want = jax.jit(jax.grad(loss_of(one_device(SMALL), problem)))(problem.floats, {})
    jax.tree.map(assert_close, got, want)


def test_second_derivative():
    case = Case(
        batch=(1,), q_seq_len=4, kv_seq_len=4, num_q_heads=2, num_kv_heads=1,
        head_dim=4, value_head_dim=4, causal=True,
    )  # fmt: skip
    problem = make_problem(case)

    def second(run):
        loss = loss_of(run, problem)
        one = lambda x: jnp.sum(jax.grad(loss)(x, {})["query"] ** 2)  # noqa: E731
        return jax.jit(jax.grad(one))(problem.floats)

    got = second(parallel(case, "ring", make_mesh(2), "ffi"))
    jax.tree.map(assert_close, got, second(one_device(case)))


@pytest.mark.parametrize("kind", KINDS)
def test_x64_and_strict_promotion(kind):
    case = dataclasses.replace(FULL, score_mods=("alibi", "soft_cap"))
    problem = make_problem(case)
    run = parallel(case, kind, make_mesh(4), "ffi")
    want = jax.jit(one_device(case))(problem.floats, problem.others)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got = jax.jit(run)(problem.floats, problem.others)
    jax.tree.map(assert_close, got, want)


def test_float64():
    with jax.enable_x64(True):
        case = Case(q_seq_len=8, kv_seq_len=8, dtype="float64", causal=True, sinks=True)
        check_parallel(case, "ring", 2, "xla", True)


def test_debug_nans():
    """-inf of rows and parts without a live key is not a NaN on the way."""
    case = Case(q_seq_len=16, kv_seq_len=16, mask_mods=("kill_rows",), lengths="qk")
    problem = make_problem(case)
    loss = loss_of(parallel(case, "ring", make_mesh(4), "ffi"), problem)
    with jax.debug_nans(True):
        value, grads = jax.jit(jax.value_and_grad(loss))(problem.floats, problem.others)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, grads)))


def test_values_never_compile(count_compiles):
    problem = make_problem(FULL)
    mesh = make_mesh(4)
    step = jax.jit(parallel(FULL, "ring", mesh, "ffi"))
    step(problem.floats, problem.others)
    changed = problem.others | {
        "kv_seq_lengths": np.asarray([3, 30], np.int32),
        "mask.0.0": np.asarray(11, np.int32),
    }
    with count_compiles() as counts:
        step(problem.floats, changed)
    assert counts.compiles == 0


# ---------------------------------------------------------------- skipping and memory


def count_calls(monkeypatch, name: str):
    """Count the executions of a primitive's call by device; returns the counter."""
    counter: collections.Counter = collections.Counter()
    original = getattr(_primitives, name)

    def counted(*args):
        device = jax.lax.axis_index("seq")
        jax.debug.callback(lambda d: counter.update([int(d)]), device)
        return original(*args)

    monkeypatch.setattr(_primitives, name, counted)
    _ring.attention.cache_clear()
    return counter


@pytest.mark.parametrize(
    ("kind", "options", "calls"),
    [
        # Part i of the queries sees the parts up to i.
        ("ring", {"causal": True}, [1, 2, 3, 4]),
        # Its own two chunks in three pairs, and two of four pairs of each other device.
        ("zigzag", {"causal": True}, [9, 9, 9, 9]),
        # A window of 8 over parts of 8: a part and the one before.
        ("ring", {"mask_mods": ("window_last",), "causal": True}, [1, 2, 2, 2]),
        ("ring", {"mask_mods": ("causal_or_prefix",)}, [2, 3, 4, 4]),
        ("ring", {"mask_mods": ("prefix_lm",)}, [4, 4, 4, 4]),
        ("ring", {"lengths": "q"}, [4, 4, 0, 0]),
        ("ring", {"lengths": "k"}, [2, 2, 2, 2]),
        ("ring", {"segment_ids": True}, [1, 1, 2, 2]),
        ("ring", {"block_mask": "causal", "block_q": 8, "block_kv": 8}, [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_dead_steps_call_no_kernel(monkeypatch, kind, options, calls, name):
    case = Case(batch=(2,), q_seq_len=32, kv_seq_len=32, **options)
    problem = make_problem(case)
    others = dict(problem.others)
    for key in others:
        if key.endswith("lengths"):
            others[key] = np.asarray([16, 9], np.int32)
        if key.endswith("segment_ids"):
            rows = [[0] * 8 + [1] * 8 + [2] * 16, [3] * 8 + [4] * 8 + [5] * 16]
            others[key] = np.asarray(rows, np.int32)
    counter = count_calls(monkeypatch, name)
    run = parallel(case, kind, make_mesh(4), "ffi")
    step = jax.jit(jax.grad(loss_of(run, problem)))
    jax.block_until_ready(step(problem.floats, others))
    jax.effects_barrier()
    _ring.attention.cache_clear()
    assert [counter[k] for k in range(4)] == calls


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_a_device_shrinks_with_their_number(kind):
    """Temporaries of forward and backward, by the compiler's own account."""

    def temporaries(num_devices, shape=(1, 4096, 8, 16)):
        mesh = make_mesh(num_devices)
        spec = P(None, "seq")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        f = jax.shard_map(
            functools.partial(
                function_of(kind), axis_name="seq", causal=True, implementation="ffi"
            ),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )

        def step(q, k, v, ct):
            out, vjp = jax.vjp(f, q, k, v)
            return out, vjp(ct)

        compiled = jax.jit(step).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporaries(2), temporaries(8)
    # Some of it is there once for each array rather than twice if n is 2.
    assert many < 0.45 * few
    part = 4 * 4096 * 8 * 16 // 8
    assert many < 16 * part


def test_what_is_sent():
    """The ring sends to neighbours only, Ulysses exchanges only."""
    problem = make_problem(SMALL)

    def collectives(kind):
        loss = loss_of(parallel(SMALL, kind, make_mesh(4), "ffi"), problem)
        text = jax.jit(jax.grad(loss)).lower(problem.floats, {}).as_text()
        names = ("all_gather", "all_to_all", "collective_permute", "all_reduce")
        return {n for n in names if f"stablehlo.{n}" in text}

    # The gradients of slopes and sinks, the same on all devices, are summed.
    assert collectives("ring") == {"collective_permute", "all_reduce"}
    assert collectives("ulysses") == {"all_to_all", "all_reduce"}


def test_what_travels_does_not_wait_for_a_kernel():
    """In the body of both loops, what is sent is what the body was given."""
    problem = make_problem(SMALL)
    loss = loss_of(parallel(SMALL, "ring", make_mesh(4), "ffi"), problem)
    sends = []

    def walk(jaxpr, is_loop):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "ppermute" and is_loop:
                sends.append(set(eqn.invars) <= set(jaxpr.invars))
            inner_is_loop = eqn.primitive.name in ("scan", "while")
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple | list) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner, inner_is_loop)

    walk(jax.make_jaxpr(jax.grad(loss))(problem.floats, {}).jaxpr, False)
    # Key and value there, key, value and their gradients back.
    assert sends == [True] * 6


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_lowers_for_cuda(kind):
    """From a machine without a GPU, and to kernels, not to plain JAX."""
    f = loss_of(parallel(SMALL, kind, make_mesh(4), "ffi"), make_problem(SMALL))
    floats = make_problem(SMALL).floats
    traced = jax.jit(jax.grad(f)).trace(floats, {})
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The ring: in the loop, and after it.
    calls = 2 if kind == "ring" else 1
    for name in ("fkl_attention_fwd", "fkl_attention_bwd"):
        assert text.count(f"custom_call @{name}") == calls


# ------------------------------------------------------------------- order of a batch


def test_zigzag_order():
    x = np.arange(12)
    got = fkl_jax.zigzag_permute(x, 3, axis=0)
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    np.testing.assert_array_equal(fkl_jax.zigzag_unpermute(got, 3, axis=-1), x)


def test_zigzag_of_a_batch():
    batch = {"tokens": jnp.arange(16).reshape(2, 8), "x": jnp.ones((2, 8, 3))}
    there = fkl_jax.zigzag_permute(batch, 2)
    assert there["tokens"][1].tolist() == [8, 9, 14, 15, 10, 11, 12, 13]
    back = fkl_jax.zigzag_unpermute(there, 2)
    jax.tree.map(np.testing.assert_array_equal, back, batch)


# ------------------------------------------------------------------------------ errors

Q = jnp.zeros((2, 12, 4, 8))


def on_mesh(f, *arrays, num_devices=4):
    spec = P(None, "seq")
    mesh = make_mesh(num_devices)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        ("ring", {"casual": True}, TypeError, "unexpected keyword argument 'casual'"),
        ("ulysses", {"zigzag": True}, TypeError, "argument 'zigzag'.*attention"),
        ("zigzag", {}, ValueError, "length 3 on each device.*must be even"),
        ("ring", {"bias": jnp.zeros((3, 3))}, ValueError, r"bias.*\(2, 4, 3, 12\)"),
        ("ring", {"causal": "left"}, ValueError, "causal is 'left'"),
        ("ring", {"return_lse": 1}, TypeError, "return_lse is 1"),
        ("ring", {"implementation": "x"}, ValueError, "implementation is 'x'"),
        (
            "ring",
            {"block_mask": fkl_jax.BlockMask(jnp.ones((1, 1, 2, 6), bool), 2, 2)},
            ValueError,
            "block_q of block_mask is 2; it must divide 3",
        ),
        (
            "ulysses",
            {"block_mask": fkl_jax.BlockMask(jnp.ones((1, 1, 2, 6), bool), 2, 2)},
            ValueError,
            "block_q of block_mask is 2; it must divide 3",
        ),
        (
            "ring",
            dict.fromkeys(("q_segment_ids", "kv_segment_ids"), jnp.zeros(3, "uint32")),
            TypeError,
            "q_segment_ids has dtype uint32.*int32",
        ),
        ("ulysses", {"sinks": jnp.zeros(1)}, ValueError, r"sinks.*must be \(4,\)"),
        (
            "ulysses",
            {"score_mod": fkl_jax.ALiBi(jnp.zeros(1))},
            ValueError,
            "slopes of ALiBi.*number of query heads, 4",
        ),
    ],
)
def test_errors(kind, options, error, text):
    f = functools.partial(function_of(kind), axis_name="seq", **options)
    with pytest.raises(error, match=text):
        on_mesh(f, Q, Q, Q)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="4 heads.*size 3.*ring_attention does not"):
        on_mesh(
            functools.partial(fkl_jax.ulysses_attention, axis_name="seq"),
            Q, Q, Q, num_devices=3,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_outside_of_shard_map(kind):
    with pytest.raises(ValueError, match="'seq' is no axis of a surrounding"):
        function_of(kind)(Q, Q, Q, axis_name="seq")


def test_length_that_has_no_zigzag_order():
    with pytest.raises(ValueError, match=r"\(2, 10\).*multiple of 2 \* num_shards = 8"):
        fkl_jax.zigzag_permute(jnp.zeros((2, 10)), 4)
    with pytest.raises(ValueError, match="axis 2"):
        fkl_jax.zigzag_permute(jnp.zeros((2, 8)), 4, axis=2)
    with pytest.raises(ValueError, match="num_shards is 0"):
        fkl_jax.zigzag_permute(jnp.zeros((2, 8)), 0)
