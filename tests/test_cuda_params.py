"""What the host passes to a CUDA kernel, without a GPU: every pointer that a kernel
would compute is compared with where NumPy says the element is."""

import itertools
import math

import numpy as np
import pytest

from fkl_jax import _ext
from fkl_jax._cuda_launch import (
    Kernel,
    Launch,
    Sizes,
    TensorMap,
    backward_workspace_bytes,
    forward_workspace_bytes,
)

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint8": 1}
T, S, N, K, H, HV = 6, 10, 4, 2, 16, 8
PER_QUERY_TILE = Kernel(name="k", threads=128, rows="q", tile=4, heads="q")


class Call:
    """Arrays at made-up addresses; axes of `*V` given as 1 are broadcast."""

    def __init__(self, vmap=(), batch=(3,), *, dtype="bfloat16", t=T, s=S):
        self.vmap, self.batch, self.dtype, self.t, self.s = vmap, batch, dtype, t, s
        self.operands, self.results, self.blocks = {}, {}, (0, 0)
        self._next = 1 << 20
        self.operand("query", (*batch, t, N, H))
        self.operand("key", (*batch, s, K, H))
        self.operand("value", (*batch, s, K, HV))
        self.operand("scale", (), "float32")

    def _array(self, shape, dtype, lead, offset=0):
        shape = [*(self.vmap if lead is None else lead), *shape]
        address = self._next + offset
        size = math.prod(shape) * ITEMSIZE[dtype]
        self._next += -(-(size + offset) // 256 + 1) * 256 + 256
        return address, dtype, shape

    def operand(self, role, shape, dtype=None, lead=None, offset=0):
        self.operands[role] = self._array(shape, dtype or self.dtype, lead, offset)
        return self

    def result(self, role, shape, dtype=None):
        self.results[role] = self._array(shape, dtype or self.dtype, None)
        return self

    def forward(self, launch=None):
        launch = launch or Launch(kernels=(PER_QUERY_TILE,))
        self.result("out", (*self.batch, self.t, N, HV))
        outer = math.prod((*self.vmap, *self.batch))
        self.results["lse"] = self._array((outer * N, self.t), "float32", ())
        sizes = Sizes.of_out((*self.vmap, *self.batch, self.t, N, HV))
        return self._prepare(False, launch, forward_workspace_bytes(launch, sizes))

    def backward(self, launch=None, results=("query", "key", "value")):
        launch = launch or Launch(kernels=(PER_QUERY_TILE,))
        out = (*self.batch, self.t, N, HV)
        for role in ("out", "dout"):
            self.operand(role, out)
        self.operand("lse", (*self.batch, N, self.t), "float32")
        for role in results:
            own = self.operands[role][2][len(self.vmap) :]
            same = role in ("query", "key", "value")
            self.result(role, own, None if same else "float32")
        sizes = Sizes.of_out((*self.vmap, *out))
        size = backward_workspace_bytes(launch, sizes, results)
        return self._prepare(True, launch, size)

    def _prepare(self, is_backward, launch, workspace_bytes):
        if workspace_bytes:
            self.results["workspace"] = self._array((workspace_bytes,), "uint8", ())
        return _ext.cuda_params(
            is_backward,
            len(self.batch),
            *self.blocks,
            self.operands,
            self.results,
            launch.encode().tolist(),
        )

    @property
    def outer(self):
        return (*self.vmap, *self.batch)

    def address(self, array, outer, num_outer_axes, inner=()):
        """Of an element, by NumPy's rules."""
        start, dtype, shape = array
        index = [*outer[:num_outer_axes], *inner]
        index = [0 if n == 1 else i for i, n in zip(index, shape, strict=True)]
        flat = np.ravel_multi_index(index, shape) if shape else 0
        return start + int(flat) * ITEMSIZE[dtype]


def outer_offset(param, sizes, flat):
    """As device/attention/outer.cuh."""
    index = np.unravel_index(flat, sizes) if sizes else ()
    return sum(int(i) * s for i, s in zip(index, param["outer_stride"], strict=False))


def pointers(prepared, name, itemsize):
    """(outer element, its pointer) of all rounds."""
    flat = 0
    for params in prepared["rounds"]:
        param = params[name]
        for o in range(params["num_outer"]):
            offset = outer_offset(param, params["outer_size"], o)
            yield flat, params, param["data"] + offset * itemsize
            flat += 1


def check(call, prepared, name, array, *, has_batch=True, inner=()):
    """The first element that a kernel finds for each outer element."""
    axes = len(call.outer) if has_batch else len(call.vmap)
    seen = 0
    for flat, _, pointer in pointers(prepared, name, ITEMSIZE[array[1]]):
        outer = np.unravel_index(flat, call.outer) if call.outer else ()
        zeros = inner or (0,) * (len(array[2]) - axes)
        assert pointer == call.address(array, outer, axes, zeros), (name, flat)
        seen += 1
    assert seen == math.prod(call.outer)


OUTER = [
    ((), ()),
    ((), (3,)),
    ((), (2, 3)),
    ((2,), (3,)),
    ((2, 1, 3), (2,)),
    ((2, 3), ()),
    ((2, 3, 2), (2, 2, 3)),
]


@pytest.mark.parametrize("vmap, batch", OUTER)
def test_plain_call_has_one_outer_axis(vmap, batch):
    call = Call(vmap, batch)
    prepared = call.forward()
    (params,) = prepared["rounds"]
    outer = math.prod((*vmap, *batch))
    assert params["num_outer"] == outer
    # The scale is the same for the batch, so *V and *B stay apart if both are there.
    assert len(params["outer_size"]) <= 2
    for role in ("query", "key", "value"):
        check(call, prepared, role, call.operands[role])
    check(call, prepared, "scale", call.operands["scale"], has_batch=False)
    check(call, prepared, "out", call.results["out"])
    assert params["lse"] == call.results["lse"][0]
    assert params["query"]["row_stride"] == N * H
    assert params["query"]["head_stride"] == H
    assert params["value"]["row_stride"] == K * HV


@pytest.mark.parametrize("vmap, batch", OUTER)
@pytest.mark.parametrize("shared", ["query", "key", "scale", "all but key"])
def test_broadcast_vmap_axes(vmap, batch, shared):
    call = Call(vmap, batch)
    one = (1,) * len(vmap)
    for role in ("query", "key", "value", "scale"):
        if role == shared or (shared == "all but key" and role != "key"):
            _, dtype, shape = call.operands[role]
            call.operand(role, shape[len(vmap) :], dtype, one)
    prepared = call.forward()
    for role in ("query", "key", "value"):
        check(call, prepared, role, call.operands[role])
    check(call, prepared, "scale", call.operands["scale"], has_batch=False)


def test_every_operand_is_found():
    vmap, batch = (2, 3), (2, 2)
    call = Call(vmap, batch)
    b = (*batch,)
    call.operand("bias", (*b, 1, T, S), "float32", (2, 1))
    call.operand("q_segment_ids", (*b, T), "int32", (1, 3))
    call.operand("kv_segment_ids", (*b, S), "int32")
    call.operand("q_seq_lengths", b, "int32", (1, 1))
    call.operand("kv_seq_lengths", b, "int32")
    call.operand("q_offset", b, "int32")
    call.operand("kv_offset", b, "int32", (2, 1))
    call.operand("sinks", (N,), "float32", (1, 3))
    call.operand("batch_index", b, "int32", (1, 1))
    call.operand("head_index", (N,), "int32", (1, 1))
    call.operand("block_mask", (1, 2, N, 3, 3), "uint8", (2, 1))
    call.blocks = (2, 4)
    call.operand("capture.0", (7, 5), "float32")
    call.operand("capture.1", (), "float32", (1, 3))
    prepared = call.forward()
    for role, array in call.operands.items():
        if role.startswith("capture."):
            continue
        has_batch = role not in ("scale", "sinks", "head_index")
        check(call, prepared, role, array, has_batch=has_batch)
    for number in (0, 1):
        for params in prepared["rounds"]:
            params[f"capture.{number}"] = params["captures"][number]
        name = f"capture.{number}"
        check(call, prepared, name, call.operands[name], has_batch=False)
    params = prepared["rounds"][0]
    assert params["bias"]["head_stride"] == 0
    assert params["bias"]["row_stride"] == S and params["bias_column_stride"] == 1
    assert params["block_mask"]["head_stride"] == 9
    assert params["block_mask"]["row_stride"] == 3
    sizes = [params[n] for n in ("block_q", "block_kv", "num_q_blocks")]
    assert [*sizes, params["num_kv_blocks"]] == [2, 4, 3, 3]
    assert params["captures"][2]["data"] == 0 and params["captures"][0]["data"] != 0


@pytest.mark.parametrize("shape", list(itertools.product((1, N), (1, T), (1, S))))
def test_bias_strides(shape):
    call = Call().operand("bias", (3, *shape), "float32")
    params = call.forward()["rounds"][0]
    n, t, s = shape
    assert params["bias"]["head_stride"] == (0 if n == 1 else t * s)
    assert params["bias"]["row_stride"] == (0 if t == 1 else s)
    assert params["bias_column_stride"] == (0 if s == 1 else 1)


def test_absent_operands_are_null():
    params = Call().forward()["rounds"][0]
    absent = ["bias", "q_segment_ids", "kv_seq_lengths", "q_offset", "sinks"]
    for name in [*absent, "block_mask", "batch_index", "head_index"]:
        assert params[name]["data"] == 0
    assert params["partial_out"] == params["scratch"] == 0


def test_more_axes_than_a_kernel_takes_run_in_rounds():
    # Six axes, no two of which step alike for both query and key.
    vmap = (2, 3, 2, 3, 2)
    call = Call(vmap, (2,))
    call.operand("query", (2, T, N, H), lead=(2, 1, 2, 1, 2))
    call.operand("key", (2, S, K, H), lead=(1, 3, 1, 3, 1))
    launch = Launch(kernels=(PER_QUERY_TILE,), num_splits=2, scratch_bytes=300)
    prepared = call.forward(launch)
    rounds = prepared["rounds"]
    assert len(rounds) == 6 and all(len(r["outer_size"]) == 4 for r in rounds)
    for role in ("query", "key", "value"):
        check(call, prepared, role, call.operands[role])
    check(call, prepared, "out", call.results["out"])
    step = rounds[0]["num_outer"] * N * T * 4
    lse = call.results["lse"][0]
    assert [r["lse"] for r in rounds] == [lse + i * step for i in range(6)]
    # The workspace is used anew in every round, with what must be zero made zero.
    assert (
        len({(r["partial_out"], r["partial_lse"], r["scratch"]) for r in rounds}) == 1
    )
    assert prepared["zeroed"] == [(rounds[0]["scratch"], 512)]
    ((blocks, _, _),) = prepared["grids"]
    assert blocks == 2 * N * rounds[0]["num_outer"]


def test_forward_workspace_parts():
    launch = Launch(kernels=(PER_QUERY_TILE,), num_splits=3, scratch_bytes=1)
    call = Call()
    params = call.forward(launch)["rounds"][0]
    start, _, (size,) = call.results["workspace"]
    out_bytes = 3 * 3 * N * T * HV * 4
    lse_bytes = -(-3 * 3 * N * T * 4 // 256) * 256
    assert params["num_splits"] == 3
    assert params["partial_out"] == start
    assert params["partial_lse"] == start + -(-out_bytes // 256) * 256
    assert params["scratch"] == params["partial_lse"] + lse_bytes
    assert start + size == params["scratch"] + 256


def test_backward_parts_and_zeroed_memory():
    call = Call(vmap=(2,))
    call.operand("bias", (3, N, T, S), "float32")
    call.operand("capture.0", (5,), "float32")
    launch = Launch(kernels=(PER_QUERY_TILE,), q_tile=4, accumulator_head_dim=32)
    asked = ("query", "key", "value", "scale", "bias", "capture.0")
    prepared = call.backward(launch, asked)
    (params,) = prepared["rounds"]
    assert params["padded_q_rows"] == 8
    start, _, (size,) = call.results["workspace"]
    rows = 6 * N * 8 * 4
    assert params["dquery_accumulator"] == start
    assert params["delta"] == start + rows * 32
    assert params["lse_log2"] == params["delta"] + rows
    assert params["dscale"] == params["lse_log2"] + rows
    assert start + size == params["dscale"] + 256
    assert prepared["zeroed"] == [(start, rows * 32), (params["dscale"], 6 * 4)]
    zeroed = dict(map(tuple, prepared["zeroed_once"]))
    expected = {call.results[r][0]: r for r in ("scale", "bias", "capture.0")}
    assert set(zeroed) == set(expected)
    assert zeroed[call.results["bias"][0]] == 2 * 3 * N * T * S * 4
    for name, role in (("dquery", "query"), ("dkey", "key"), ("dvalue", "value")):
        check(call, prepared, name, call.results[role])
    check(call, prepared, "dbias", call.results["bias"])
    check(call, prepared, "dscale_result", call.results["scale"], has_batch=False)
    check(call, prepared, "lse", call.operands["lse"])
    assert params["dcaptures"][0]["data"] == call.results["capture.0"][0]
    assert params["dlse"]["data"] == 0


def test_gradient_nobody_asked_for_is_null():
    params = Call().backward(results=("key",))["rounds"][0]
    assert params["dquery"]["data"] == params["dvalue"]["data"] == 0
    assert params["dkey"]["data"] != 0 and params["dscale"] == 0


@pytest.mark.parametrize("t, s", [(0, S), (T, 0), (0, 0)])
def test_backward_without_rows_or_keys_only_zeroes(t, s):
    call = Call(t=t, s=s)
    prepared = call.backward()
    assert not prepared["has_kernels"] and prepared["rounds"] == []
    zeroed = {address for address, _ in prepared["zeroed_once"]}
    full = {r[0] for r in call.results.values() if math.prod(r[2])} - {
        call.results.get("workspace", (None,))[0]
    }
    assert zeroed == full


def test_forward_without_keys_launches_and_without_rows_does_not():
    assert Call(s=0).forward()["has_kernels"]
    assert not Call(t=0).forward()["has_kernels"]
    assert not Call(batch=(0,)).forward()["has_kernels"]


def test_alignment_is_that_of_every_row():
    assert Call().forward()["is_aligned"]
    for role, shape in (("query", (3, T, N, H)), ("value", (3, S, K, HV))):
        assert not Call().operand(role, shape, offset=8).forward()["is_aligned"]
        assert Call().operand(role, shape, offset=16).forward()["is_aligned"]
    # Rows of 20 bytes.
    call = Call()
    call.operand("query", (3, T, N, 10)).operand("key", (3, S, K, 10))
    assert not call.forward()["is_aligned"]
    # Arrays that are read element by element do not count.
    bias = Call().operand("bias", (3, N, T, S), "float32", offset=4)
    assert bias.forward()["is_aligned"]


def test_grids():
    kernels = (
        Kernel(name="a", threads=256, shared_bytes=99, rows="q", tile=4, heads="q"),
        Kernel(name="b", threads=64, rows="kv", tile=4, heads="kv", per_split=True),
        Kernel(name="c", threads=32, rows="packed_q", tile=5, heads="kv"),
        Kernel(name="d", threads=32, per_outer=False),
    )
    grids = Call().forward(Launch(kernels=kernels, num_splits=2))["grids"]
    assert grids == [
        (2 * N * 3, 256, 99),
        (3 * K * 3 * 2, 64, 0),
        (3 * K * 3, 32, 0),
        (1, 32, 0),
    ]


TMA_LAUNCH = Launch(
    kernels=(Kernel(name="k", threads=384, rows="q", tile=2, heads="q", max_blocks=5),),
    scratch_bytes=256,
    tensor_maps=(
        TensorMap(array="query", rows=64, columns=64),
        TensorMap(array="value", rows=80, columns=32),
        TensorMap(array="out", rows=64, columns=64),
    ),
    unaligned=Launch(kernels=(PER_QUERY_TILE,)),
)


def test_tensor_maps():
    call = Call(vmap=(2,), batch=(3,))
    call.operand("value", (3, S, K, HV), lead=(1,))
    shown = call.forward(TMA_LAUNCH)
    assert shown["grids"] == [(5, 384, 0)]
    (params,) = shown["rounds"]
    assert params["scratch"] and shown["zeroed"] == [(params["scratch"], 256)]
    assert params["maps"] == [
        (params["query"]["data"], [H, N, T, 6], [64, 1, 64, 1]),
        (params["value"]["data"], [HV, K, S, 3], [32, 1, 80, 1]),
        (params["out"]["data"], [HV, N, T, 6], [64, 1, 64, 1]),
    ]
    # The axes cannot be merged: all queries have the same values.
    assert params["outer_size"] == [2, 3]
    strides = [s[:2] for s in params["map_outer_stride"][:3]]
    assert strides == [[3, 1], [0, 1], [3, 1]]


def test_tensor_maps_of_later_rounds_end_where_the_array_ends():
    call = Call(vmap=(2, 2, 2, 2, 2), batch=(3,))  # no two neighbours can be merged
    call.operand("value", (3, S, K, HV), lead=(2, 1, 2, 1, 2))
    call.operand("key", (3, S, K, H), lead=(1, 2, 1, 2, 1))
    rounds = call.forward(TMA_LAUNCH)["rounds"]
    assert len(rounds) == 4
    total = 2**5 * 3
    for index, params in enumerate(rounds):
        address, dims, _ = params["maps"][0]
        assert address == params["query"]["data"]
        assert dims == [H, N, T, total - index * total // 4]


def test_unaligned_rows_have_a_launch_of_their_own():
    call = Call().operand("query", (3, T, N, H), offset=8)
    shown = call.forward(TMA_LAUNCH)
    assert shown["grids"] == [(2 * N * 3, 128, 0)]
    (params,) = shown["rounds"]
    assert params["maps"] == [] and params["scratch"] == 0


def test_too_many_blocks_is_a_sentence():
    call = Call(batch=(1 << 20,), t=1 << 14)
    kernel = Kernel(name="k", threads=32, rows="q", tile=1, heads="q")
    with pytest.raises(ValueError, match="blocks or more, CUDA takes 2147483647"):
        call.forward(Launch(kernels=(kernel,)))


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda n: [], "it has 0 numbers"),
        (lambda n: [1, *n[1:]], "format 1, this library reads format 2"),
        (lambda n: n[:-1], "it has 14 numbers, what it describes needs more"),
        (lambda n: [*n, 7], "it has 16 numbers, what it describes needs 15"),
        (lambda n: [n[0], 3, *n[2:]], "the number of classes is 3"),
        (lambda n: [*n[:2], 0, *n[3:]], "the number of kernels is 0"),
        (lambda n: [*n[:3], 999, *n[4:]], "num_splits is 999"),
        (lambda n: [*n[:7], 9, *n[8:]], "the number of tensor maps is 9"),
        (lambda n: [*n[:8], 0, *n[9:]], "threads is 0"),
        (lambda n: [*n[:11], 0, *n[12:]], "tile is 0"),
    ],
)
def test_damaged_record_is_refused(change, expected):
    numbers = change(Launch(kernels=(PER_QUERY_TILE,)).encode().tolist())
    call = Call()
    call.forward()
    with pytest.raises(ValueError, match=expected):
        _ext.cuda_params(False, 1, 0, 0, call.operands, call.results, numbers)


def test_small_workspace_is_refused():
    launch = Launch(kernels=(PER_QUERY_TILE,), num_splits=2)
    call = Call()
    call.forward(launch)
    address, dtype, (size,) = call.results["workspace"]
    call.results["workspace"] = (address, dtype, [size - 1])
    with pytest.raises(ValueError, match="the workspace has .* the kernels need"):
        _ext.cuda_params(
            False, 1, 0, 0, call.operands, call.results, launch.encode().tolist()
        )


def test_preparing_a_launch_is_cheap():
    call = Call()
    call.operand("q_seq_lengths", (3,), "int32")
    call.operand("bias", (3, N, T, S), "float32")
    call.forward()
    numbers = Launch(kernels=(PER_QUERY_TILE,)).encode().tolist()
    arguments = (False, 1, 0, 0, call.operands, call.results, numbers)
    best = min(_ext.cuda_params_microseconds(*arguments, 2000) for _ in range(5))
    # Twice per call, and a call may cost 20 us; the machine may be busy.
    assert best < 20
    print(f"{best:.2f} us")
