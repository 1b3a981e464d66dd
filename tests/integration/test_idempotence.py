"""Nothing lost, nothing doubled, order kept, while brokers die, freeze and hand over."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kill_a_broker.py"


@pytest.mark.usefixtures("kafka_available")
def test_a_million_records_survive_dying_frozen_and_moving_brokers() -> None:
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=290)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
    assert "1,000,000 of 1,000,000 records read: 0 lost, 0 doubled, 0 out of order" in run.stdout
    assert "reported as failed: 0" in run.stdout
    # The faults met traffic: records were still to come when the last of them was over.
    last = next(line for line in run.stdout.splitlines() if "broker 3 back and in sync" in line)
    assert int(last.split(" handed in")[0].split()[-1].replace(",", "")) < 1_000_000
