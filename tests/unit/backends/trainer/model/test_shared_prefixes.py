"""The segments of datums that begin alike, for random tries: each token sees the tokens before it in its datums, and no
other."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tries import depth_of, random_trie
from tinker_server.backends.trainer.model.shared_prefixes import (
    LEAST_SAVED,
    MOST_LEVELS,
    NO_PARENT,
    Prefixes,
    Trie,
    count_common,
    join,
)

SEEDS = st.integers(0, 2**32 - 1)


def found(datums: list[np.ndarray]) -> Trie:
    return Prefixes(datums).trie(range(len(datums)))


def text(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, length)


def seen(trie: Trie) -> np.ndarray:
    """[T, T] which tokens a token sees, by attention's calls."""
    sees_TT = np.zeros((trie.num_tokens,) * 2, bool)
    for begin, end in pairwise(trie.begins):
        sees_TT[begin:end, begin:end] = np.tri(end - begin, dtype=bool)
    for _, lowest, highest, first, last in trie.spans():
        assert not sees_TT[lowest:highest, first:last].any(), "no token is seen twice"
        sees_TT[lowest:highest, first:last] = True
    return sees_TT


def test_random_tries_have_all_that_may_be_wrong() -> None:
    tries = [random_trie(seed) for seed in range(60)]
    assert {min(5, depth_of(texts)) for texts in tries} == {1, 2, 3, 4, 5}
    lengths = {len(datum) for texts in tries for datum in texts}
    assert min(lengths) == 1 and max(lengths) > 300
    pairs = [(one, other) for texts in tries for one, other in combinations(texts, 2)]
    common = [(count_common(one, other), len(one), len(other)) for one, other in pairs]
    assert any(shared == first == second for shared, first, second in common), "equal datums"
    assert any(shared == first < second for shared, first, second in common), "a datum that begins another"
    assert any(0 < shared == first - 1 == second - 1 for shared, first, second in common), "suffixes of a token"


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_token_sees_those_before_it_in_each_of_its_datums(seed: int) -> None:
    datums = random_trie(seed)
    trie = found(datums)
    packed = np.concatenate([datums[one.datum][one.begin : one.end] for one in trie.segments])
    sees_TT = seen(trie)
    for number, datum in enumerate(datums):
        own = trie.tokens_of(number)
        np.testing.assert_array_equal(packed[own], datum)
        for place, token in enumerate(own):
            np.testing.assert_array_equal(np.flatnonzero(sees_TT[token]), np.sort(own[: place + 1]))
    assert set(np.concatenate([trie.tokens_of(number) for number in range(len(datums))])) == set(range(trie.num_tokens))
    assert max(level for level, *_ in [(-1,), *trie.spans()]) < MOST_LEVELS - 1
    levels = [level for level, *_ in trie.spans()]
    for level in set(levels):
        queries = [range(row[1], row[2]) for row in trie.spans() if row[0] == level]
        assert len(set().union(*queries)) == sum(map(len, queries)), "on a level no token is behind two segments"


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(50, 2000), st.integers(1, 3))
def test_units_have_every_datum_once_and_keep_the_budget(seed: int, most: int, side_by_side: int) -> None:
    datums = random_trie(seed)
    prefixes = Prefixes(datums)
    units = prefixes.units(most, side_by_side)
    assert sorted(datum for unit, _ in units for datum in unit) == list(range(len(datums)))
    assert all(prefixes.num_tokens(unit) == num_tokens for unit, num_tokens in units)
    assert all(len(unit) == 1 or num_tokens <= most for unit, num_tokens in units)


def test_units_of_a_thousand_datums_take_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = Prefixes([np.concatenate([text(200, 0), text(10, seed)]) for seed in range(1, 1001)])
    tries = list[int]()
    trie = Prefixes.trie

    def counted(self: Prefixes, some: Sequence[int], *, alone: bool = True) -> Trie:
        tries.append(len(some))
        return trie(self, some, alone=alone)

    monkeypatch.setattr(Prefixes, "trie", counted)
    units = prefixes.units(1000)
    assert {len(unit) for unit, _ in units} == {80, 40}
    assert sum(tries) < 20 * 1000


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_some_of_a_batchs_datums_have_the_trie_that_they_have_alone(seed: int) -> None:
    datums = random_trie(seed)
    prefixes = Prefixes(datums)
    some = np.random.default_rng(seed).permutation(len(datums))[: len(datums) // 2 + 1].tolist()
    of_some, alone = prefixes.trie(some), found([datums[number] for number in some])
    assert (of_some.num_tokens, of_some.saved) == (alone.num_tokens, alone.saved)


def test_a_group_has_its_prompt_once() -> None:
    prompt = text(1024, 0)
    datums = [np.concatenate([prompt, text(256, seed)]) for seed in range(1, 9)]
    assert found(datums).num_tokens == 1024 + 8 * 256
    assert found([*datums, text(100, 9)]).num_tokens == 1024 + 8 * 256 + 100


def test_a_datum_that_begins_another_needs_no_token_of_its_own() -> None:
    whole = text(2400, 0)
    trie = found([whole[:length] for length in (800, 2400, 1600, 2400)])
    assert (trie.num_tokens, len(trie.segments), trie.saved) == (2400, 1, 4800)


def test_what_would_save_little_is_computed_whole() -> None:
    group = [np.concatenate([text(64, 0), text(256, seed)]) for seed in range(1, 5)]
    assert found(group).saved == 0, "as many tokens attend once more as are saved"
    beginnings = [text(LEAST_SAVED // 2 - 1, 0)] * 3
    assert found(beginnings).saved == 0
    assert found([*beginnings, beginnings[0]]).saved > 0


def test_a_batch_with_too_little_to_share_is_planned_as_any_other() -> None:
    groups = [np.concatenate([text(64, seed), text(256, 10 * seed + one)]) for seed in (1, 2, 3) for one in range(4)]
    assert not Prefixes(groups).shares
    assert Prefixes([*groups, *[text(LEAST_SAVED, 4)] * 2]).shares


def test_where_states_are_carried_each_segment_saves_a_chunk() -> None:
    for length, is_shared in ((60, False), (80, True)):
        group = [np.concatenate([text(length, 0), text(1, seed)]) for seed in range(1, 21)]
        assert found(group).saved > 0
        assert (Prefixes(group, saved_per_segment=64).trie(range(len(group))).saved > 0) == is_shared


def test_states_count_as_tokens_of_a_microbatch() -> None:
    groups = [np.concatenate([text(600, seed), text(20, 10 * seed + one)]) for seed in (1, 2, 3) for one in range(4)]
    prefixes = Prefixes(groups, tokens_per_state=10)
    assert prefixes.num_tokens(range(4)) == 680 + 10 * (2 * 2 + 4 * 6)
    assert prefixes.num_tokens([0, 4, 8]) == 3 * 620, "nothing is shared, so that no state is kept"
    assert [num_tokens for _, num_tokens in prefixes.units(1200)] == [960] * 3
    assert all(num_tokens <= 940 for _, num_tokens in prefixes.units(940))


def test_groups_of_one_short_common_beginning_share_their_own_prompts_alone() -> None:
    system = text(20, 0)
    prompts = [np.concatenate([system, text(600, seed)]) for seed in (1, 2)]
    trie = found([np.concatenate([one, text(100, seed)]) for one in prompts for seed in range(3, 7)])
    assert trie.num_tokens == 2 * (620 + 4 * 100)
    assert {one.parent for one in trie.segments if one.begin == 0} == {NO_PARENT}


def test_a_small_microbatch_of_text_is_whole_where_graphs_compute_it() -> None:
    group = [np.concatenate([text(600, 0), text(100, seed)]) for seed in range(1, 5)]
    prefixes = Prefixes(group, 2200)
    assert prefixes.trie([0, 1, 2]).saved == 0 and prefixes.trie(range(4)).saved == 1800
    with_image = [np.concatenate([[-1] * 100, one]) for one in group]
    assert Prefixes(with_image, 3000).trie([0, 1]).saved == 700


def test_small_units_are_counted_as_in_a_large_microbatch_if_they_fit_whole_too() -> None:
    groups = [[np.concatenate([text(600, seed), text(100, 10 * seed + one)]) for one in range(3)] for seed in (1, 2, 3)]
    prefixes = Prefixes([one for group in groups for one in group], 3000)
    assert [num_tokens for _, num_tokens in prefixes.units(4096)] == [900] * 3
    assert [num_tokens for _, num_tokens in prefixes.units(2500)] == [2100] * 3


def test_tries_of_several_models_lie_one_after_the_other() -> None:
    group = [np.concatenate([text(600, 0), text(100, seed)]) for seed in range(1, 4)]
    trie = join([found([text(5, 9)]), found(group), found(group[:2])])
    assert trie.num_tokens == 5 + 900 + 800 and trie.lengths == [5, *[700] * 5]
    assert trie.tokens_of(4)[[0, 599, 600]].tolist() == [905, 1504, 1505]


def test_deep_tries_end_in_whole_datums() -> None:
    behind = 40
    parts: list[int] = []
    while len(parts) < MOST_LEVELS + 2:  # each saves just enough
        parts.append(max(LEAST_SAVED, behind // 2 + 20))
        behind += parts[-1] + 20
    ends = np.cumsum(parts[::-1]).tolist()
    trunk = text(ends[-1], 0)
    datums = [np.concatenate([trunk[:end], text(20, seed)]) for seed, end in enumerate([*ends, ends[-1]])]
    trie = found(datums)
    assert max(level for level, *_ in trie.spans()) == MOST_LEVELS - 2
    np.testing.assert_array_equal(
        np.concatenate([datums[one.datum][one.begin : one.end] for one in trie.segments])[trie.tokens_of(8)], datums[8]
    )
