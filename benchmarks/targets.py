"""What `bench_gpu.py` has to reach on one NVIDIA H200, per kernel family."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A figure that a workload has to reach.

    The figure is the rate (TFLOP/s, or TB/s of a decoding step). With `against`, it is
    the time divided by that of the workload of this name, measured in the same rounds;
    with `against` and `faster`, the other way round.
    """

    workload: str
    at_least: float | None = None
    at_most: float | None = None
    against: str = ""
    faster: bool = False

    def verdict(self, figure: float) -> bool:
        if self.at_least is not None:
            return figure >= self.at_least
        return self.at_most is not None and figure <= self.at_most

    def words(self, figure: float) -> str:
        sign, limit = (">=", self.at_least) if self.at_least else ("<=", self.at_most)
        if not self.against:
            return f"{sign} {limit:g}"
        what = "times faster than" if self.faster else "times the time of"
        return f"{figure:.2f} {what} {self.against}, {sign} {limit:g}"


def rates(at_least: dict[str, float]) -> list[Target]:
    """Targets by workload."""
    return [Target(workload=k, at_least=v) for k, v in at_least.items()]


_BOTH = [
    *rates({"decode 32 x 8192 keys": 3.8, "decode 1 x 65536 keys": 3.3}),
    # The same program text; the rest is noise.
    Target(
        workload="ALiBi lambda causal 8k",
        at_most=1.02,
        against="ALiBi built-in causal 8k",
    ),
]

TARGETS: dict[str, list[Target]] = {
    "sm80": [
        *rates(
            {
                "H=128 8k full": 330,
                "H=128 8k causal": 300,
                "H=128 8k full, backward": 240,
                "H=128 8k causal, backward": 220,
                "H=64 8k full": 280,
                "H=64 8k causal": 250,
                "H=64 8k full, backward": 200,
                "H=64 8k causal, backward": 180,
            }
        ),
        *(
            Target(workload=name, at_most=cost, against="H=128 8k causal")
            for name, cost in {
                "ALiBi built-in causal 8k": 1.10,
                "ALiBi lambda causal 8k": 1.10,
                "SoftCap 20 causal 8k": 1.35,
                "window 1024, 8k": 0.2,
            }.items()
        ),
        Target(
            workload="block mask 10 %, 8k",
            at_least=6.0,
            against="H=128 8k full",
            faster=True,
        ),
        *_BOTH,
    ],
    "sm90": [
        *rates(
            {
                "H=128 8k full": 700,
                "H=128 8k causal": 690,
                "H=64 8k full": 545,
                "H=64 8k causal": 510,
                "H=256 8k full": 740,
                "H=256 8k causal": 715,
                "H=128 causal 2k": 580,
                "H=128 causal 16k": 725,
                "llama3-8b 32/8 heads causal 8k": 690,
                "batch 32, 512 tokens causal": 315,
                "H=96 causal 8k": 560,
                "H=192 causal 8k": 620,
                "SoftCap 20 causal 8k": 520,
                "ALiBi lambda causal 8k": 600,
                "window 1024, 8k": 500,
                "H=128 8k full, backward": 610,
                "H=128 8k causal, backward": 580,
                "H=64 8k full, backward": 515,
                "H=64 8k causal, backward": 490,
                "H=256 8k full, backward": 440,
                "H=256 8k causal, backward": 420,
            }
        ),
        Target(workload="block mask 10 %, 16k", at_most=0.13, against="full 16k"),
        Target(
            workload="8 documents by segment ids, 16k",
            at_least=0.9,
            against="8 documents as a batch",
            faster=True,
        ),
        *_BOTH,
    ],
}


def targets_of(family: str, workload: str) -> list[Target]:
    """What a workload has to reach in a family, "sm80" or "sm90"."""
    return [t for t in TARGETS.get(family, []) if t.workload == workload]
