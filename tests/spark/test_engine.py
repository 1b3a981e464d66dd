"""The Spark that all tests share: what a test does to it must not reach the next."""

import os
import signal
import threading

import pytest
from conftest import interrupts


class TimeIsOver(BaseException):
    """As pytest-timeout's: raised by a signal handler, and no Exception."""


def interrupted_in_a_call(spark) -> pytest.ExceptionInfo[TimeIsOver]:
    """Ends a call to the JVM by a signal, before its answer comes. Whoever keeps the exception, as pytest does for its
    report, keeps the call's connection, and the next call takes it."""

    def stop(number, frame) -> None:
        raise TimeIsOver

    old = signal.signal(signal.SIGUSR1, stop)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(TimeIsOver) as kept:
            spark._jvm.java.lang.Thread.sleep(2000)
        return kept
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_only_what_may_end_a_test_anywhere_costs_a_spark() -> None:
    """A skipped test did: half of the time of all tests on Spark went into JVMs that were started after one."""
    assert not interrupts(AssertionError())
    assert not interrupts(pytest.skip.Exception("takes minutes"))
    assert interrupts(pytest.fail.Exception("Timeout"))
    assert interrupts(KeyboardInterrupt())


@pytest.mark.long
def test_a_test_interrupted_in_a_call_leaves_a_sound_spark_to_the_next(spark_engine) -> None:
    first = spark_engine.sound()
    assert spark_engine.sound() is first  # one for all
    java = first.sparkContext._gateway.proc
    kept = interrupted_in_a_call(first)
    assert not spark_engine._answers(), "nothing was broken, so that this test shows nothing"
    second = spark_engine.sound()
    assert second is not first
    assert java.poll() is not None  # nothing of the broken one is left
    assert second.range(1000).selectExpr("sum(id)").collect()[0][0] == 499_500
    assert second.sparkContext.parallelize(range(10), 2).map(lambda n: n + 1).sum() == 55  # by Python workers
    assert spark_engine.sound() is second
    del kept


@pytest.mark.long
def test_a_spark_that_a_test_has_stopped_is_replaced(spark_engine) -> None:
    spark_engine.sound().stop()
    assert spark_engine.sound().range(7).count() == 7


@pytest.mark.long
def test_a_spark_whose_jvm_is_gone_is_replaced(spark_engine) -> None:
    spark_engine.sound().sparkContext._gateway.proc.kill()
    assert spark_engine.sound().range(7).count() == 7
