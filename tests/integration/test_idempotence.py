"""Nothing lost, nothing doubled, order kept, while brokers die, freeze and hand over."""

from pathlib import Path

import pytest
from programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "kill_a_broker.py"


@pytest.mark.usefixtures("kafka_available")
def test_a_million_records_survive_dying_frozen_and_moving_brokers() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert "1,000,000 of 1,000,000 records read: 0 lost, 0 doubled, 0 out of order" in done.stdout
    assert "reported as failed: 0" in done.stdout
    # The faults met traffic: records were still to come when the last of them was over.
    last = next(line for line in done.stdout.splitlines() if "broker 3 back and in sync" in line)
    assert int(last.split(" handed in")[0].split()[-1].replace(",", "")) < 1_000_000
