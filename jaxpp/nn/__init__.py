"""The maths that models share. Names dims, never mesh axes."""

from jaxpp.nn.attention import Attention, AttentionConfig, Context, Layer
from jaxpp.nn.embedding import Embedding
from jaxpp.nn.ladder import Streams
from jaxpp.nn.linear import Linear
from jaxpp.nn.loss import cross_entropy
from jaxpp.nn.mlp import Mlp
from jaxpp.nn.norm import Norm
from jaxpp.nn.stack import layers_from, num_blocks, run_blocks, split_blocks, stack_blocks

__all__ = [
    "Attention", "AttentionConfig", "Context", "Embedding", "Layer", "Linear", "Mlp", "Norm", "Streams",
    "cross_entropy", "layers_from", "num_blocks", "run_blocks", "split_blocks", "stack_blocks",
]  # fmt: skip
