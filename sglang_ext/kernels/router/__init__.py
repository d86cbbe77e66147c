"""Expert routing: logits in, experts and weights out."""

from sglang_ext.core.router import ExpertChoice
from sglang_ext.kernels.router.api import route_grouped_sigmoid, route_hash, route_sqrtsoftplus

__all__ = ["ExpertChoice", "route_grouped_sigmoid", "route_hash", "route_sqrtsoftplus"]
