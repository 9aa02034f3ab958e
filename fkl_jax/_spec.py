"""AttentionSpec: the one static description of a call, and the only cache key.

Everything that selects code is in here; everything else is an operand. Two calls with
equal specs and equal operand shapes share one compiled program, whatever Python
objects they were made of.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _trace
from ._program import Program, compile_program

ABI = 1  # of the custom calls; docs/internals.md


@dataclasses.dataclass(frozen=True, eq=False)
class TracedMod:
    """All score mods, or all masks, of a call as one traced function. Compares by
    content.

    Attributes:
        traced: the function after tracing.
        program: what the compiled backends run, or None.
        unsupported: why there is no program.
        text: canonical text; equal texts mean equal functions.
    """

    traced: _trace.TracedFunction
    program: Program | None
    unsupported: str | None
    text: str

    def with_captures_from(self, first: int) -> "TracedMod":
        """The same mod, its program reading captures `first`, `first + 1`, ..."""
        if self.program is None or first == 0:
            return self
        return _renumbered(self, first)

    def reads(self, name: str) -> bool:
        """True if the mod reads the input `name`, or may do so."""
        return self.program is None or name in self._inputs

    @functools.cached_property
    def _inputs(self) -> frozenset[str]:
        names = _trace.INPUTS[self.traced.kind]
        assert self.program is not None
        return frozenset(filter(self.program.uses, names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedMod) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=1024)
def _renumbered(mod: TracedMod, first: int) -> TracedMod:
    assert mod.program is not None
    program = mod.program.with_captures_from(first)
    return dataclasses.replace(mod, program=program, text=f"{program.text}\nas mask")


def compile_mod(traced: _trace.TracedFunction, function: Any) -> TracedMod:
    """Compile a traced function if it can be; otherwise keep the reason."""
    try:
        program = compile_program(traced, function)
    except _trace.Unsupported as e:
        return TracedMod(traced, None, str(e), _text_of_jaxpr(traced))
    dtype = traced.closed.jaxpr.invars[0].aval.dtype
    return TracedMod(traced, program, None, f"{program.text}\nof {np.dtype(dtype)}")


def _text_of_jaxpr(traced: _trace.TracedFunction) -> str:
    """A text for what has no program. Where the text of its jaxpr does not say
    everything, such a mod is only equal to itself; the `TracedMod` keeps the jaxpr
    alive, hence its address its own."""
    jaxpr = traced.closed.jaxpr
    own = "" if _trace.text_says_all(jaxpr) else f"\nat {id(jaxpr)}"
    return f"{traced.kind}\n{jaxpr}{own}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static description of a call.

    Attributes:
        operands: roles of the operands, in order (docs/internals.md, section 3).
        num_batch_dims: number of leading batch axes `*B`.
        score: all score mods as one function, or None.
        mask: causal and all mask mods as one function, or None.
        num_score_captures: captures of the score; those of the mask follow.
        capture_ndims: number of axes of each capture.
        block_q, block_kv: tile sizes of the block mask, 0 without one.
        deterministic: gradients are bitwise repeatable.
        precision: "default", "high" or "highest".
    """

    operands: tuple[str, ...]
    num_batch_dims: int
    score: TracedMod | None = None
    mask: TracedMod | None = None
    num_score_captures: int = 0
    capture_ndims: tuple[int, ...] = ()
    block_q: int = 0
    block_kv: int = 0
    deterministic: bool = False
    precision: str = "default"

    @functools.cached_property
    def text(self) -> str:
        """The canonical text: equal specs have equal texts and different specs
        different ones."""
        lines = [f"fkl_attention abi {ABI}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = " ".join(map(str, value))
            if isinstance(value, TracedMod):
                lines.append(f"{field.name}:")
                lines += [f"  {line}" for line in value.text.splitlines()]
            else:
                lines.append(f"{field.name}: {value}")
        return "\n".join(lines)

    @functools.cached_property
    def digest(self) -> str:
        """A short name of the spec: the start of the SHA-256 of its text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.text)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, AttentionSpec) and self.text == other.text
        )

    def __repr__(self) -> str:
        return f"AttentionSpec<{self.digest}>"

    def base_ndim(self, role: str) -> int:
        """Number of axes of an operand without vmap axes."""
        if role.startswith("capture."):
            return self.capture_ndims[int(role.partition(".")[2])]
        own = _OWN_NDIM[role]
        return (
            own
            if role in ("scale", "sinks", "head_index")
            else self.num_batch_dims + own
        )

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Operands by role."""
        return dict(zip(self.operands, operands, strict=True))


@functools.lru_cache(maxsize=4096)
def interned_spec(**fields: Any) -> AttentionSpec:
    """Return the spec with these fields, the same object every time: its text, hash
    and comparison are then made once."""
    return AttentionSpec(**fields)


_OWN_NDIM = {
    "query": 3,
    "key": 3,
    "value": 3,
    "scale": 0,
    "bias": 3,
    "q_segment_ids": 1,
    "kv_segment_ids": 1,
    "q_seq_lengths": 0,
    "kv_seq_lengths": 0,
    "q_offset": 0,
    "kv_offset": 0,
    "sinks": 1,
    "block_mask": 3,
    "batch_index": 0,
    "head_index": 1,
    "out": 3,
    "lse": 2,
    "dout": 3,
    "dlse": 2,
}
