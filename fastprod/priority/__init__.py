"""Priority levels: level i of the topic `orders` is the Kafka topic `orders-i`; the highest number goes first.

>>> from fastprod.priority import CapacityBurstConsumer, PriorityProducer
"""

from fastprod.priority.consumer import CapacityBurstConsumer, LevelStats
from fastprod.priority.policies import CapacityBurst, Policy, Shares, Strict, exponential
from fastprod.priority.producer import PriorityProducer

__all__ = [
    "CapacityBurst",
    "CapacityBurstConsumer",
    "LevelStats",
    "Policy",
    "PriorityProducer",
    "Shares",
    "Strict",
    "exponential",
]
