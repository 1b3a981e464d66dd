"""Producer groups (KIP-509): several producers share a source with N partitions, and its restart positions.

>>> from fastprod.groups import ProducerGroup, RebalanceError
"""

from fastprod.errors import RebalanceError
from fastprod.groups.group import ProducerGroup, RebalanceListener

__all__ = ["ProducerGroup", "RebalanceError", "RebalanceListener"]
