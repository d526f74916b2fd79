"""The bench of the scheduler runs. The test does not check the measured times."""

from __future__ import annotations

from benchmarks.scheduler import make_scheduler, measure


def test_the_bench_measures_a_batch_that_decodes_to_the_end() -> None:
    times = measure(3, num_steps=10, num_waiting=2, num_clients=2)

    assert set(times) == {
        "schedule_us", "update_us", "total_us", "total_mean_us", "total_p99_us", "encode_us",
        "output_us", "output_p99_us",
    }  # fmt: skip
    assert all(value > 0 for value in times.values())


def test_the_bench_batch_holds_every_request() -> None:
    scheduler, _ = make_scheduler(3, 10)

    plan = scheduler.schedule()

    assert plan is not None and len(plan.batches[0].started) == 3
