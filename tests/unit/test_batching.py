"""Microbatch plans."""

import itertools

from backends.trainer.batching import plan_microbatches


def test_every_datum_is_planned_once_and_rows_keep_the_budget():
    lengths = [5, 90, 30, 30, 40, 7, 100, 200, 1]
    for world_size in (1, 2, 3):
        plan = plan_microbatches(lengths, world_size, 100)
        rows = list(itertools.chain.from_iterable(plan))
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= 100 or len(row) == 1 for row in rows)


def test_all_ranks_run_equally_many_steps():
    plan = plan_microbatches([10] * 7, 4, 10)
    assert {len(steps) for steps in plan} == {2}
    assert sum(not row for steps in plan for row in steps) == 1


def test_a_datum_longer_than_the_budget_runs_alone():
    assert [len(row) for row in plan_microbatches([500, 10, 10], 1, 100)[0]] == [1, 2]
