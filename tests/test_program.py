"""Programs: what a mod becomes, and when two mods are the same."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fkl_jax import ALiBi, Causal, MaskMod, ScoreMod, SoftCap
from fkl_jax._bytecode import encode
from fkl_jax._compose import trace_masks, trace_scores
from fkl_jax._program import OPS, SUPPORTED_PRIMITIVES, Node, Program
from fkl_jax._spec import AttentionSpec

ROOT = Path(__file__).parent.parent


def _score(function, *params):
    return trace_scores([ScoreMod(function, *params)], jnp.float32)


def _ops(program: Program) -> list[str]:
    return [n.op for n in program.nodes if n.op not in ("const", "input", "load")]


def test_equal_lambdas_made_anew_have_equal_texts():
    def make(slopes):
        return _score(lambda s, b, h, q, kv: s - slopes[h] * (q - kv))[0]

    first, second = make(jnp.ones(4)), make(jnp.arange(4.0))
    assert first == second and hash(first) == hash(second)
    assert first.text == second.text


def test_a_lambda_and_the_built_in_of_the_same_formula_are_one_program():
    cap = jnp.float32(3.0)
    mine, _ = _score(lambda s, b, h, q, kv: cap * jnp.tanh(s / cap))
    theirs, _ = trace_scores([SoftCap(7.0)], jnp.float32)
    assert mine == theirs


@pytest.mark.parametrize(
    "other",
    [
        lambda s, b, h, q, kv: s + 2.0,
        lambda s, b, h, q, kv: s - 1.0,
        lambda s, b, h, q, kv: s + 1.0 * h,
        lambda s, b, h, q, kv: jnp.where(q > kv, s + 1.0, s),
    ],
)
def test_another_function_is_another_text(other):
    assert _score(lambda s, b, h, q, kv: s + 1.0)[0] != _score(other)[0]


def test_a_user_rule_is_part_of_the_identity():
    def ruled(factor):
        @jax.custom_jvp
        def f(x):
            return x

        f.defjvp(lambda primals, tangents: (f(*primals), factor * tangents[0]))
        return _score(lambda s, b, h, q, kv: f(s))[0]

    assert ruled(2.0) != ruled(3.0)
    assert ruled(2.0) == ruled(2.0)


def test_common_subexpressions_and_dead_code_disappear():
    def f(s, b, h, q, kv):
        _ = jnp.exp(s) + jnp.sin(s)
        return jnp.tanh(s * 2.0) * jnp.tanh(2.0 * s)

    ops = _ops(_score(f)[0].program.forward())
    assert ops == ["mul.f32", "tanh.f32", "mul.f32"]


def test_constant_index_arithmetic_folds():
    table = jnp.ones((3, 4))
    program = _score(lambda s, b, h, q, kv: s + table[-1, 2])[0].program.forward()
    assert _ops(program) == ["add.f32"]
    (load,) = [n for n in program.nodes if n.op == "load"]
    assert [program.nodes[a].data for a in load.args] == [2, 2]


def test_a_head_index_is_known_not_to_be_negative():
    slopes = jnp.ones(4)
    program = _score(lambda s, b, h, q, kv: s * slopes[h])[0].program.forward()
    assert _ops(program) == ["mul.f32"]


def test_captures_are_operands_with_one_gradient_each():
    table, ids = jnp.ones((4, 9)), jnp.arange(6)
    mod, captures = _score(lambda s, b, h, q, kv: s * table[h, ids[q]] + table[0, 0])
    assert sorted(c.shape for c in captures) == [(4, 9), (6,)]
    assert len(mod.program.load_grads) == 2  # the ids have none
    assert mod.program.dscore is not None


def test_reads_of_one_element_are_one_load_with_the_sum_of_their_gradients():
    table = jnp.ones(4)
    mod, _ = _score(lambda s, b, h, q, kv: s + table[h] + table[h])
    ((load, grad),) = mod.program.load_grads
    node = mod.program.nodes[grad]
    assert mod.program.nodes[load].op == "load" and node.op == "add.f32"
    assert {mod.program.nodes[a].data for a in node.args} == {"ct"}


def test_what_a_jitted_helper_closes_over_is_captured():
    def make(table):
        helper = jax.jit(lambda s, h: s * table[h])
        return _score(lambda s, b, h, q, kv: helper(s, h))

    (first, before), (second, after) = make(jnp.ones(4)), make(jnp.arange(4.0))
    assert first.program is not None and first == second
    np.testing.assert_array_equal(before[0], np.ones(4))
    np.testing.assert_array_equal(after[0], np.arange(4.0))


def test_traced_values_may_be_captured():
    @jax.jit
    def f(slopes):
        mod, captures = _score(lambda s, b, h, q, kv: s * slopes[h])
        assert mod.program is not None
        return captures[0]

    np.testing.assert_array_equal(f(jnp.arange(3.0)), np.arange(3.0))


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (
            lambda s, b, h, q, kv: s + jnp.sort(jnp.stack([s, s]))[0],
            "stack|sort|concat",
        ),
        (lambda s, b, h, q, kv: s + jax.lax.erf_inv(s), "erf_inv"),
        # An int32 does not hold their values.
        (lambda s, b, h, q, kv: s + (q - kv).astype(jnp.uint32) * 1.0, "uint32"),
        (lambda s, b, h, q, kv: s + s.astype(jnp.uint32).astype(jnp.int32), "uint32"),
        (lambda s, b, h, q, kv: jax.lax.fori_loop(0, 3, lambda _, x: x * s, s), "scan"),
    ],
)
def test_what_no_program_can_say_is_named_with_its_line(function, word):
    mod, _ = _score(function)
    assert mod.program is None
    assert re.search(word, mod.unsupported), mod.unsupported
    assert re.search(r"test_program\.py:\d+", mod.unsupported), mod.unsupported


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, kv: q * jnp.int64(3_000_000_000) > kv,
        lambda b, h, q, kv: q.astype(jnp.int64) * kv > 5,
        lambda b, h, q, kv: jnp.asarray([2**33, 2**34])[q] == q,
    ],
)
def test_64_bit_integers_that_int32_might_not_hold_are_refused(function):
    with jax.enable_x64(True):
        mod, _ = trace_masks([MaskMod(function)])
    assert mod.program is None and "int32" in mod.unsupported, mod.unsupported


def test_equal_functions_are_refused_each_with_its_own_line():
    first = _score(lambda s, b, h, q, kv: s - jax.lax.erf_inv(s))[0]
    second = _score(lambda s, b, h, q, kv: s - jax.lax.erf_inv(s))[0]
    assert first == second
    lines = [int(m.unsupported.rpartition(":")[2]) for m in (first, second)]
    assert lines[1] == lines[0] + 1


def test_masks_conjoin():
    mod, captures = trace_masks([Causal(), MaskMod(lambda b, h, q, kv: kv % 2 == 0)])
    assert mod.program.nodes[mod.program.result].op == "and.bool"
    assert captures == []


def _spec(**changes) -> AttentionSpec:
    base = dict(operands=("query", "key", "value", "scale"), num_batch_dims=1)
    return AttentionSpec(**{**base, **changes})


def test_every_field_of_the_spec_changes_its_text():
    score, mask = (
        trace_scores([SoftCap(1.0)], jnp.float32)[0],
        trace_masks([Causal()])[0],
    )
    changes = dict(
        operands=("query", "key", "value", "scale", "bias"),
        num_batch_dims=2,
        score=score,
        mask=mask,
        num_score_captures=1,
        capture_ndims=(0,),
        block_q=64,
        block_kv=64,
        deterministic=True,
        precision="highest",
    )
    assert set(changes) == {f.name for f in dataclasses.fields(AttentionSpec)}
    specs = [_spec(), *(_spec(**{name: value}) for name, value in changes.items())]
    assert len({s.text for s in specs}) == len({s.digest for s in specs}) == len(specs)
    assert _spec() == _spec() and hash(_spec()) == hash(_spec())


def test_the_list_of_operations_is_that_of_the_extension():
    from fkl_jax import _ext

    assert list(OPS) == list(_ext.program_ops())


def test_the_documented_primitives_are_those_of_the_code():
    text = (ROOT / "docs" / "adding-a-score-mod.md").read_text()
    table = re.search(
        r"<!-- primitives:begin -->(.*)<!-- primitives:end -->", text, re.S
    )
    assert table is not None
    assert sorted(re.findall(r"`(\w+)`", table[1])) == sorted(set(SUPPORTED_PRIMITIVES))


def test_bytecode_registers_hold_what_is_still_needed():
    """Run the register assignment symbolically: an operand is where it was put."""
    slopes, table = jnp.ones(4), jnp.ones((4, 33))

    def f(s, b, h, q, kv):
        x = jnp.tanh(s - slopes[h] * (q - kv)) * table[h, jnp.clip(q - kv, 0, 32)]
        return jnp.where(x > 0, jnp.exp(x) * s, jnp.log1p(jnp.abs(x)) + x * s)

    program = _score(f)[0].program
    code = encode(program)
    n, g = code[1], code[5]
    records = code[7 + 2 * g :][: 8 * n].reshape(n, 8)
    holds: dict[int, int] = {}
    for stage in (2, 3):
        for k in np.flatnonzero(records[:, 2] == stage):
            node = program.nodes[k]
            for a in node.args:
                if records[a, 2] >= 2:
                    assert holds[records[a, 3]] == a, (k, a)
            holds[records[k, 3]] = k
    for value in (program.dscore, *(v for _, v in program.load_grads)):
        if records[value, 2] >= 2:
            assert holds[records[value, 3]] == value
    assert code[2] < n


def test_constants_compare_by_their_bits():
    texts = {
        _score(lambda s, b, h, q, kv, c=c: jnp.where(q > 0, s, c))[0].text
        for c in (0.0, -0.0, float("nan"), float("inf"))
    }
    assert len(texts) == 4
    assert Node("const", "f32") != Node("const", "i32")


def test_alibi_computes_its_distance_once():
    ops = _ops(trace_scores([ALiBi(jnp.ones(4))], jnp.float32)[0].program)
    assert ops.count("sub.i32") == 1
