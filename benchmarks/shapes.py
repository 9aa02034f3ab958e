"""Named problem sizes, shared by the benchmarks, so that figures can be compared."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one attention call; `source` says where they come from."""

    batch: int = 1
    q_seq_len: int
    kv_seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    source: str

    @property
    def query(self) -> tuple[int, int, int, int]:
        return (self.batch, self.q_seq_len, self.num_q_heads, self.head_dim)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (self.batch, self.kv_seq_len, self.num_kv_heads, self.head_dim)

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}"
        if self.num_kv_heads != self.num_q_heads:
            heads += f"/{self.num_kv_heads}"
        return (
            f"B={self.batch} T={self.q_seq_len} S={self.kv_seq_len} "
            f"heads={heads} H={self.head_dim}"
        )


def self_attention(
    seq_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int, source: str
) -> Shape:
    return Shape(
        q_seq_len=seq_len,
        kv_seq_len=seq_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        source=source,
    )


SHAPES = {
    "square-4k": self_attention(4096, 8, 8, 64, "the sizes of the promised ratios"),
    "long-16k": self_attention(16384, 8, 8, 64, "the promised memory bound"),
    "decode-64k": Shape(
        q_seq_len=1,
        kv_seq_len=65536,
        num_q_heads=8,
        num_kv_heads=8,
        head_dim=64,
        source="one new token against a long cache",
    ),
    "gpt2-1k": self_attention(1024, 12, 12, 64, "GPT-2 small, its full context"),
    "gemma2-2b-2k": self_attention(2048, 8, 4, 256, "Gemma 2 2B, one layer"),
    "llama3-8b-2k": self_attention(2048, 32, 8, 128, "Llama 3 8B, one layer"),
    # For `--quick`: every code path, no meaningful time.
    "tiny": self_attention(256, 2, 2, 64, "smoke test"),
    "tiny-long": self_attention(1024, 2, 2, 64, "smoke test"),
    "tiny-decode": Shape(
        q_seq_len=1,
        kv_seq_len=2048,
        num_q_heads=2,
        num_kv_heads=2,
        head_dim=64,
        source="smoke test",
    ),
}
