"""What the data source knows about the Python process that it is in, and says there.

Spark makes a writer in a process of its own for each job and for each batch of a stream, and in another one to commit a
batch. If making it fails, the user gets that process's traceback. For what we have to say about options and brokers the
frames are noise, so refusals come in one line, and that line first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from confluent_kafka import KafkaException

from fastprod.spark._check import SKIP, CheckError

__all__ = ["briefly", "is_first_batch"]

Made = TypeVar("Made", bound=Callable[..., Any])
PLANNING = "pyspark.sql.worker.write_into_data_source"  # what a process runs in which a job or batch is planned
HIDE = "SPARK_HIDE_TRACEBACK"  # pyspark's own switch, which it reads when an exception is on its way to the JVM


def briefly(make: Made) -> Made:
    """Raises what `make` refuses without the way it took through our code."""

    @wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        try:
            return make(*args, **named)
        except CheckError as problem:
            short: Exception = CheckError(str(problem).replace(SKIP, '.option("check", "false")'))
        except KafkaException as problem:
            short = ValueError(problem.args[0].str())
        except (ValueError, TypeError) as problem:
            short = problem.with_traceback(None)
        # The process ends with the exception, so this hides no traceback of anybody else's.
        if PLANNING in sys.modules:
            os.environ[HIDE] = "1"
        raise short from None

    return cast(Made, made)


def is_first_batch(checkpoint: str | None) -> bool:
    """Whether a stream is about to write for the first time, as far as can be seen here.

    Later on, brokers that are away for a while must not end a query whose tasks would wait for them.
    """
    if PLANNING not in sys.modules or checkpoint is None:
        return False
    path = Path(checkpoint.removeprefix("file:"))
    return path.is_dir() and not any((path / "commits").glob("[0-9]*"))
