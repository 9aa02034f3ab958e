"""Encode a program for the CPU interpreter (docs/internals.md, section 2).

Values that depend only on (b, h) or on the query row are scalars, computed once per
head or row; the rest are rows of scores, whose registers are assigned here by liveness.
"""

from typing import Any

import numpy as np

from ._program import BOOL, F32, I32, OPS, Program

_VERSION = 1
_OP = {name: k for k, name in enumerate(OPS)}
_TYPE = {F32: 0, I32: 1, BOOL: 2}
_INPUT = {"score": 0, "b": 1, "h": 2, "q": 3, "kv": 4, "ct": 5}
_INPUT_STAGE = {"score": 2, "b": 0, "h": 0, "q": 1, "kv": 2, "ct": 3}


def encode(program: Program | None) -> np.ndarray:
    """Return the bytecode, int32; empty without a program."""
    if program is None:
        return np.zeros((0,), np.int32)
    stages = _stages(program)
    registers, num_registers = _registers(program, stages)
    unit = _unit_stride(program, stages)
    records: list[int] = []
    extra: list[int] = []
    for k, node in enumerate(program.nodes):
        a = b = c = imm = 0
        if node.op == "const":
            imm = int(_bits(node.type, node.data))
        elif node.op == "input":
            a = _INPUT[node.data]
        elif node.op == "load":
            a, b, c = node.data[0], len(extra), len(node.args)
            extra.extend(node.args)
            imm = int(bool(node.args) and unit[node.args[-1]])
        else:
            a, b, c = (*node.args, 0, 0, 0)[:3]
        records += [
            _OP[node.op],
            _TYPE[node.type],
            stages[k],
            registers[k],
            a,
            b,
            c,
            imm,
        ]
    header = [
        _VERSION,
        len(program.nodes),
        num_registers,
        program.result,
        -1 if program.dscore is None else program.dscore,
        len(program.load_grads),
        len(extra),
    ]
    pairs = [i for pair in program.load_grads for i in pair]
    return np.asarray([*header, *pairs, *records, *extra], np.int32)


# --- private -------------------------------------------------------------------------


def _bits(kind: str, value: float) -> np.int32:
    if kind == F32:
        return np.float32(value).view(np.int32)
    return np.int32(-1 if value else 0) if kind == BOOL else np.int32(value)


def _stages(program: Program) -> list[int]:
    """When each value can be computed; a vector value that only the derivative needs
    waits for it."""
    stages: list[int] = []
    for node in program.nodes:
        if node.op == "input":
            stages.append(_INPUT_STAGE[node.data])
        else:
            stages.append(max((stages[a] for a in node.args), default=0))
    needed = {program.result}
    for k in range(len(program.nodes) - 1, -1, -1):
        if k in needed:
            needed.update(program.nodes[k].args)
    return [
        3 if s == 2 and k not in needed and program.nodes[k].op != "input" else s
        for k, s in enumerate(stages)
    ]


def _registers(program: Program, stages: list[int]) -> tuple[list[int], int]:
    """Linear scan over the vector values in the order in which they run: stage 2, then
    stage 3.

    Inputs keep a register of their own for the whole run: the caller owns the rows
    behind them.
    """
    order = [k for s in (2, 3) for k, t in enumerate(stages) if t == s]
    forever = len(order)
    last = {k: i for i, k in enumerate(order)}
    for i, k in enumerate(order):
        for a in program.nodes[k].args:
            if stages[a] >= 2:
                last[a] = i
    results = [program.result, program.dscore, *(g for _, g in program.load_grads)]
    # The gradients of loads also need the indices of the loads.
    results += [i for load, _ in program.load_grads for i in program.nodes[load].args]
    for r in results:
        if r is not None and r in last:
            last[r] = forever
    for k in order:
        if program.nodes[k].op == "input":
            last[k] = forever
    registers = [0] * len(program.nodes)
    free: list[int] = []
    count = 0
    live: list[int] = []
    for i, k in enumerate(order):
        for a in [a for a in live if last[a] <= i]:
            live.remove(a)
            free.append(registers[a])
        if free:
            registers[k] = free.pop()
        else:
            registers[k], count = count, count + 1
        live.append(k)
    return registers, count


def _unit_stride(program: Program, stages: list[int]) -> list[bool]:
    """True for `kv` plus something uniform over the row."""
    unit: list[bool] = []
    for node in program.nodes:
        if node.op == "input":
            unit.append(node.data == "kv")
        elif node.op == "add.i32":
            a, b = node.args
            unit.append((unit[a] and stages[b] < 2) or (unit[b] and stages[a] < 2))
        elif node.op == "sub.i32":
            a, b = node.args
            unit.append(unit[a] and stages[b] < 2)
        else:
            unit.append(_is_wrapped(program, unit, node))
    return unit


def _is_wrapped(program: Program, unit: list[bool], node: Any) -> bool:
    """`x < 0 ? x + size : x`: what JAX makes of an index that may be negative."""
    if node.op != "select":
        return False
    test, wrapped, x = (program.nodes[a] for a in node.args)
    return (
        unit[node.args[2]]
        and test.op == "lt.i32"
        and test.args[0] == node.args[2]
        and wrapped.op == "add.i32"
        and unit[node.args[1]]
    )
