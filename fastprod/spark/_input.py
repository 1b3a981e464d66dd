"""Whether a task's rows have ended, or were cut off.

When something fails above a Python worker, or its task is killed, Spark closes the worker's input. The readers of
pyspark, for Arrow as for pickled rows, take that for the end of the data: a task cannot tell from its rows that some
are missing. It can tell from what follows them. Behind the last row, and only there, the JVM sends the number
`SpecialLengths.END_OF_STREAM`, which pyspark's worker reads when the task's function has returned:

    ... rows ...  [end of Arrow stream | END_OF_DATA_SECTION]  END_OF_STREAM      all rows are here
    ... rows ...  (closed)                                                        cut off

`TaskInput` looks at that number without taking it away. pyspark has no call for this: the stream is a local variable of
`pyspark.worker`, up the stack from the task's function. Where it cannot be found, nothing is proven, and the task
refuses to go on.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import sys
from types import FrameType
from typing import Any

from fastprod.spark._sink import ExportError

__all__ = ["TaskInput"]

NAMES = ("input_data_stream", "infile")  # of the stream in pyspark.worker, that of 4.3 first
MARKER = struct.calcsize("!i")  # bytes


def _module(frame: FrameType) -> str:
    """Where a frame's code is from; a program's own module has the name __main__."""
    name = str(frame.f_globals.get("__name__"))
    return getattr(frame.f_globals.get("__spec__"), "name", name) if name == "__main__" else name


class TaskInput:
    """The stream through which the JVM feeds this Python worker."""

    def __init__(self, stream: Any, number: int) -> None:
        self._stream = stream
        self.number = number
        """Of the partition whose rows these are. A coalesce() after the writer makes one task of several of them."""

    @classmethod
    def find(cls) -> TaskInput:
        """That of the task whose function calls this. Raises ExportError where pyspark does not show it."""
        stream = number = None
        frame: FrameType | None = sys._getframe()
        while frame is not None and (stream is None or number is None):
            if _module(frame) == "pyspark.worker":
                known = frame.f_locals
                if stream is None:
                    stream = next((known[name] for name in NAMES if hasattr(known.get(name), "peek")), None)
                if number is None:
                    number = known.get("split_index", getattr(known.get("init_info"), "split_index", None))
            frame = frame.f_back
        if stream is not None and isinstance(number, int):
            return cls(stream, number)
        import pyspark

        raise ExportError(
            f"exactly_once cannot see how the input of a task ends in pyspark {pyspark.__version__}, so it cannot know "
            "whether rows are missing. Nothing was sent. It can with pyspark 4.0, 4.1 and 4.3; without "
            "exactly_once any version will do"
        )

    def check_end(self, *, may_stop: bool = False) -> None:
        """Raises ExportError unless the rows that were read are all that there are.

        `may_stop`: whoever reads the rows may have stopped before their end, as `take` does; then more of them follow,
        which shows as well that nothing was cut off.
        """
        from pyspark.serializers import SpecialLengths

        follows = self._look(MARKER)
        if follows == struct.pack("!i", SpecialLengths.END_OF_STREAM) or (may_stop and len(follows) == MARKER):
            return
        raise ExportError(
            "the rows of this task were cut off: Spark has closed its input before the end, because something failed "
            "before fastprod, or because the task was cancelled. Its transaction is aborted, readers of committed "
            "data see nothing of it. What Spark says about this task has the cause"
        )

    def check_wanted(self) -> None:
        """Raises ExportError if Spark has given up this task in the meantime."""
        try:
            line = socket.socket(fileno=os.dup(self._stream.fileno()))
        except io.UnsupportedOperation:  # not a socket: the end of the rows was proof enough
            return
        with line:
            line.setblocking(True)  # whatever socket.setdefaulttimeout() says: the stream is not ours to change
            try:
                still_there = line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                still_there = b""
        if not still_there:
            raise ExportError(
                "Spark has given up this task after its last row, so it was cancelled or its executor is ending. Its "
                "transaction is aborted, readers of committed data see nothing of it"
            )

    def _look(self, size: int) -> bytes:
        """The next bytes, fewer only at the end; they stay where they are."""
        found = bytes(self._stream.peek(size)[:size])
        if 0 < len(found) < size:  # the network has divided the marker
            with socket.socket(fileno=os.dup(self._stream.fileno())) as line:
                line.setblocking(True)
                found += line.recv(size - len(found), socket.MSG_PEEK | socket.MSG_WAITALL)
        return found
