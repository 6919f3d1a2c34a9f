"""Growth: a checkpoint into a larger model that computes the same function, by the arrows of its weights."""

from jaxpp.grow.enlarge import enlarge
from jaxpp.grow.grown import Grown
from jaxpp.grow.operators import OPERATORS, Operator
from jaxpp.grow.proof import Proof, check
from jaxpp.grow.request import Request
from jaxpp.grow.step import Growth, Step

__all__ = ["OPERATORS", "Grown", "Growth", "Operator", "Proof", "Request", "Step", "check", "enlarge"]
