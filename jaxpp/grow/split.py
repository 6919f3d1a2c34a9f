"""How a weight is divided over copies of what it reads; every way sums to the old weight.

Source: Samragh et al., Scaling Smart: Accelerating Large Language Model Pre-training with Small Model Initialization
    (HyperCloning), 2024, section 3 (symmetric, diagonal, noisy); Wang et al., LEMON, 2024 (unequal shares).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["symmetric", "diagonal", "unequal"]


@dataclass(frozen=True)
class Split:
    """How the copies of a unit share its weight.

    Args:
        kind: ``"symmetric"``: equally; ``"diagonal"``: copy k of what is written reads copy k alone; ``"unequal"``:
            shares 1 +- u of an even one, u drawn for each weight between -1/2 and 1/2.
        noise_db: signal over noise, in dB, of noise that pairs of copies add and subtract; None: none. Without noise
            or unequal shares, copies get equal gradients and stay copies for ever.
        seed: of the noise.

    Raises:
        ValueError: noise louder than the weights by 40 dB or more, or an unknown kind.
    """

    kind: Kind = "symmetric"
    noise_db: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("symmetric", "diagonal", "unequal"):
            raise ValueError(f'split "{self.kind}": one of symmetric, diagonal, unequal is needed')
        if self.noise_db is not None and not -40 < self.noise_db < 200:
            raise ValueError(f"noise_db = {self.noise_db}: signal over noise in dB, 10 to 20 is usual; none: no noise")

    def reseeded(self, seed: int) -> Split:
        """Return the same split with another seed."""
        return Split(self.kind, self.noise_db, seed)
