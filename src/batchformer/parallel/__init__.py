"""Attention over the batch of several processes, exactly, gradients included (`scope="global"`)."""

from batchformer.parallel.cost import Links, StepCost, bytes_sent, cheapest_exchange, step_cost
from batchformer.parallel.lost import PeerLost
from batchformer.parallel.members import Members
from batchformer.parallel.relate import relate_across
from batchformer.parallel.traffic import Traffic, count_traffic
from batchformer.parallel.weight import mean_loss_weight

__all__ = [
    "Links",
    "Members",
    "PeerLost",
    "StepCost",
    "Traffic",
    "bytes_sent",
    "cheapest_exchange",
    "count_traffic",
    "mean_loss_weight",
    "relate_across",
    "step_cost",
]
