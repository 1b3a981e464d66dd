"""What tests put in the way of their jobs. Executors import it: the tests' folder is on their path."""

import os
import signal


class KillOnce:
    """A partitioner that kills its Python worker in the first attempt at a Spark partition, halfway through."""

    def __init__(self, victim: int, after: int) -> None:
        self.victim = victim
        self.left = after

    def partition(self, topic, key, value, partitions, available) -> int:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context.partitionId() == self.victim and context.attemptNumber() == 0:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return len(value) % partitions
