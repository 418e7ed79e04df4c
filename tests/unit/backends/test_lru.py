"""The bounded cache under all others."""

from tinker_server.backends.lru import LRU


def kept(cache: LRU[str, bytes], names: str) -> list[str]:
    return [name for name in names if cache.get(name) is not None]


def test_what_was_used_last_is_kept_within_the_size() -> None:
    cache: LRU[str, bytes] = LRU(10, len)
    for name in "ab":
        cache.put(name, b"1234")
    assert cache.get("a") == b"1234"
    cache.put("c", b"1234")
    assert kept(cache, "abc") == ["a", "c"]
    cache.put("huge", b"x" * 11)
    assert kept(cache, "ac") == ["a", "c"] and cache.get("huge") is None


def test_a_value_in_place_of_another_counts_once() -> None:
    cache: LRU[str, bytes] = LRU(10, len)
    for size in (9, 2, 5):
        cache.put("a", b"x" * size)
        assert cache.size == size
    assert cache.setdefault("a", b"other") == b"x" * 5 and cache.setdefault("b", b"new") == b"new"
    assert cache.pop("a") == b"x" * 5 and cache.pop("a") is None and cache.size == 3


def test_nothing_goes_before_it_is_trimmed_where_it_does_not_trim_itself() -> None:
    cache: LRU[str, bytes] = LRU(10, len, evicts=False)
    for name in "abc":
        cache.put(name, b"x" * 6)
    assert kept(cache, "bca") == ["b", "c", "a"] and cache.size == 18
    cache.trim()
    assert kept(cache, "abc") == ["a"]


def test_values_are_evicted_by_a_rule() -> None:
    cache: LRU[str, bytes] = LRU(10, len)
    for name in ("a", "bb", "ccc"):
        cache.put(name, name.encode())
    cache.keep(lambda value: len(value) != 2)
    assert (cache.size, len(cache)) == (4, 2)
    cache.clear()
    assert (cache.size, len(cache)) == (0, 0)
