"""What a user asks for, and the operators that it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpp.grow.operators import DEPTH, OPERATORS, WIDTH
from jaxpp.grow.split import Kind
from jaxpp.grow.step import Growth, Step
from jaxpp.grow.target import preset, steps_to
from jaxpp.grow.width import DEFAULT_NOISE_DB
from jaxpp.model import ModelConfig
from jaxpp.models import DecoderConfig
from jaxpp.names import unknown


@dataclass(frozen=True)
class Request:
    """Sizes to reach; the operators follow in this order, each on the model that the one before made.

    Args:
        width: the stream as a multiple of the old one, heads and mlp with it.
        embed_dim: the stream alone, as a size (lemon, net2net, aki, msg).
        operator: of the width, one of `WIDTH`.
        variant: how weights are divided over copies: symmetric, diagonal.
        noise_db: signal over noise, in dB, of what tells copies apart; None: none.
        heads: number of query heads.
        kv_heads: number of key and value heads; 0: whole groups.
        head_dim: size of a head.
        mlp: width of the mlp, or of each expert.
        vocab: number of tokens.
        depth: number of layers.
        depth_op: one of `DEPTH`.
        layers: the source layer of each layer, in place of a depth.
        experts: number of experts.
        top_k: experts that each token visits.
        granularity: parts that each expert is cut into.
        drop: fraction of each expert's hidden units that is drawn anew.
        ladder: number of layers, the last ones, that read the stream one branch earlier; no size grows.
        ramp_steps: msg: steps in which new units fade in.
        target: a preset or a `DecoderConfig` to reach, in place of sizes.
        seed: of noise and draws.

    Raises:
        ValueError: unknown names; sizes that exclude one another.
    """

    width: float = 0
    embed_dim: int = 0
    operator: str = "hypercloning"
    variant: Kind = "symmetric"
    noise_db: float | None = DEFAULT_NOISE_DB
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    mlp: int = 0
    vocab: int = 0
    depth: int = 0
    depth_op: str = "identity"
    layers: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 2
    granularity: int = 1
    drop: float = 0.0
    ladder: int = 0
    ramp_steps: int = 1000
    target: str | DecoderConfig = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, given, known in (("operator", self.operator, WIDTH), ("depth_op", self.depth_op, DEPTH)):
            if given not in known:
                raise ValueError(unknown(f"{name}: unknown", given, known))
        if self.depth and self.layers:
            raise ValueError(f"depth {self.depth} and a list of {len(self.layers)} layers: give one of them")
        if self.width and self.embed_dim:
            raise ValueError(f"width {self.width:g} and embed_dim {self.embed_dim}: give one of them")
        if self.embed_dim and self.operator == "hypercloning":
            raise ValueError(f"embed_dim {self.embed_dim}: hypercloning takes a width; lemon takes sizes")
        if self.kv_heads and not self.heads:
            raise ValueError(f"kv_heads {self.kv_heads}: give heads too, the number of query heads")
        if self.target and self._sizes():
            raise ValueError(f"a target says all sizes: leave out {', '.join(self._sizes())}")

    def _sizes(self) -> list[str]:
        sizes = ("width", "embed_dim", "heads", "kv_heads", "head_dim", "mlp", "vocab")
        names = (*sizes, "depth", "layers", "experts", "ladder")
        return [name for name in names if getattr(self, name)]

    def growth(self, config: ModelConfig | None) -> Growth:
        """Return the steps that lead from a model to what is asked for.

        Raises:
            ValueError: no decoder of ours, nothing asked for, or an operator cannot reach it; says what it can.
        """
        if not isinstance(config, DecoderConfig):
            raise ValueError(f"growth needs a model with a DecoderConfig, and this one has a {type(config).__name__}")
        if self.target:
            wanted = preset(self.target) if isinstance(self.target, str) else self.target
            steps = steps_to(config, wanted, noise_db=self.noise_db, seed=self.seed, depth_op=self.depth_op)
            return Growth(tuple(steps))
        found: list[Step] = []
        for make in (*self._of_width(), *self._of_the_rest()):
            found.append(make(found[-1].target if found else config, len(found)))
        return Growth(tuple(found))

    def _step(self, name: str, **sizes: Any) -> Callable[[DecoderConfig, int], Step]:
        """Return what makes one step; each draws noise of its own."""
        seeded = name not in ("vocab", "layers", "ladder", *DEPTH)

        def make(config: DecoderConfig, number: int) -> Step:
            seed = dict(seed=self.seed + number) if seeded else {}
            return OPERATORS[name].make(config, **sizes, **seed)

        return make

    def _of_width(self) -> list[Callable[[DecoderConfig, int], Step]]:
        if self.operator == "msg":
            return [self._masked] if self._sizes() else []
        if not (self.width or self.embed_dim):
            return []
        sizes = dict(width=self.width) if self.width else dict(embed_dim=self.embed_dim)
        if self.operator == "hypercloning":
            return [self._step("hypercloning", **sizes, variant=self.variant, noise_db=self.noise_db)]
        if self.operator == "lemon":
            return [self._step("lemon", **sizes), *self._in_proportion()]
        return [self._step(self.operator, **sizes, noise_db=self.noise_db)]

    def _in_proportion(self) -> list[Callable[[DecoderConfig, int], Step]]:
        """Grow heads and mlp by the width, where no size of their own is asked for."""

        def more_heads(config: DecoderConfig, number: int) -> Step:
            wanted = round(self.width * config.num_heads)
            return self._step("heads", num_heads=wanted, noise_db=self.noise_db)(config, number)

        def wider_mlp(config: DecoderConfig, number: int) -> Step:
            width = (config.moe.mlp_dim if config.moe.num_experts else 0) or config.mlp_dim
            return self._step("mlp", mlp_dim=round(self.width * width), noise_db=self.noise_db)(config, number)

        wanted = ((self.heads, more_heads), (self.mlp, wider_mlp))
        return [make for given, make in wanted if self.width and not given]

    def _masked(self, config: DecoderConfig, number: int) -> Step:
        embed_dim = self.embed_dim or round(self.width * config.embed_dim)
        if given := [
            name for name in ("kv_heads", "head_dim", "vocab", "layers", "experts", "ladder") if getattr(self, name)
        ]:
            raise ValueError(f"msg grows embed_dim, mlp, heads and depth, not {', '.join(given)}")
        return OPERATORS["msg"].make(
            config, embed_dim=embed_dim, mlp_dim=self.mlp, num_heads=self.heads, num_layers=self.depth,
            ramp_steps=self.ramp_steps, seed=self.seed,
        )  # fmt: skip

    def _of_the_rest(self) -> list[Callable[[DecoderConfig, int], Step]]:
        if self.operator == "msg" and self._sizes():
            return []
        divided = dict(variant=self.variant, noise_db=self.noise_db)
        moe = dict(
            num_experts=self.experts, experts_per_token=self.top_k, granularity=self.granularity, reinitialize=self.drop
        )
        asked = {
            "heads": (self.heads, dict(num_heads=self.heads, num_kv_heads=self.kv_heads, **divided)),
            "head_dim": (self.head_dim, dict(head_dim=self.head_dim, **divided)),
            "mlp": (self.mlp, dict(mlp_dim=self.mlp, **divided)),
            "vocab": (self.vocab, dict(vocab_size=self.vocab)),
            self.depth_op: (self.depth, dict(num_layers=self.depth)),
            "layers": (self.layers, dict(sources=self.layers)),
            "upcycle": (self.experts, moe),
            "ladder": (self.ladder, dict(num_layers=self.ladder)),
        }
        return [self._step(name, **sizes) for name, (given, sizes) in asked.items() if given]
