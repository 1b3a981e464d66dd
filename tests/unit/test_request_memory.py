"""Memory that librdkafka takes for requests: used again, not fetched from the kernel for each."""

import os
import platform

import pytest
from programs import run

MEGABYTES = 200

SEND = f"""
import resource
from fastprod import Producer
from fastprod.testing import MockClusterProcess

values = [bytes(1000)] * 10_000
with MockClusterProcess(1, topics={{"t": 10}}) as cluster:
    with Producer({{"bootstrap.servers": cluster.bootstrap_servers}}) as producer:
        def send(megabytes):
            for _ in range(megabytes // 10):
                producer.produce_many("t", values)
            assert producer.flush() == 0
        send({MEGABYTES})  # until every thread has what it needs
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        send({MEGABYTES})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how other allocators keep memory is their own affair")
def test_requests_use_memory_again() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = run("-c", SEND, env=environment)
    assert done.returncode == 0, done.stderr
    pages = MEGABYTES * 1_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages / 4, "a page fault for nearly every page that was sent"
