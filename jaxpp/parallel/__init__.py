"""How one array operation is spread over a mesh: schemes, layouts, plans.

A scheme is one file here and one line in `SCHEMES`; a contract test runs over that table.
"""

from jaxpp.parallel.execution import (
    Execution,
    active_layout,
    batch_shards,
    constrain,
    current,
    executing,
    residual,
)
from jaxpp.parallel.layout import Layout, bytes_per_device, compose
from jaxpp.parallel.local import per_shard
from jaxpp.parallel.pipelining import PipelineConfig
from jaxpp.parallel.plan import Plan
from jaxpp.parallel.product import PRODUCT, in_use, product, products
from jaxpp.parallel.rules import Rules, Scheme
from jaxpp.parallel.schemes import SCHEMES

__all__ = [
    "PRODUCT", "SCHEMES", "Execution", "Layout", "PipelineConfig", "Plan", "Rules", "Scheme", "active_layout",
    "batch_shards", "bytes_per_device", "compose", "constrain", "current", "executing", "in_use", "per_shard",
    "product", "products", "residual",
]  # fmt: skip
