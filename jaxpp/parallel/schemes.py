"""The table of parallel schemes: a new one is a file beside this and a line here."""

from jaxpp.parallel.data import Data
from jaxpp.parallel.expert import Expert
from jaxpp.parallel.rules import Scheme
from jaxpp.parallel.sequence import Sequence
from jaxpp.parallel.stage import Stage
from jaxpp.parallel.tensor_1d import Tensor1D
from jaxpp.parallel.zero import Fsdp, Zero1

SCHEMES: dict[str, Scheme] = {
    "data": Data(),
    "zero1": Zero1(),
    "fsdp": Fsdp(),
    "tensor": Tensor1D(),
    "sequence": Sequence(),
    "expert": Expert(),
    "stage": Stage(),
}
