from typing import Any

import numpy
from numpy.typing import NDArray

def crc32_many(names: Any, what: str = "name") -> NDArray[numpy.uint32]:
    """The CRC-32 of every name of a column, as uint32; errors call the column `what`.

    `names` is anything a `Column` takes. A null has no position: it is a ValueError that says where it is.
    """
