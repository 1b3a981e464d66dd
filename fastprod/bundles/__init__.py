"""Bundles: topics hash into ranges, ranges belong to writers, and a range splits where its heavy topics part.

>>> from fastprod.bundles import BundleLoad, BundleMap, plan
>>> BundleMap.equal(4).find("orders")
'0xc0000000_0xffffffff'
"""

from fastprod.bundles.load import BundleLoad, TopicLoad
from fastprod.bundles.map import BundleMap, hash_position, hash_positions
from fastprod.bundles.plan import Move, Plan, plan, reassign
from fastprod.bundles.split import NotSplit, Request, Split, algorithms, isolate, register, split

__all__ = [
    "BundleLoad",
    "BundleMap",
    "Move",
    "NotSplit",
    "Plan",
    "Request",
    "Split",
    "TopicLoad",
    "algorithms",
    "hash_position",
    "hash_positions",
    "isolate",
    "plan",
    "reassign",
    "register",
    "split",
]
