"""Eager returns."""

from tests.e2e.test_eager import (  # noqa: F401
    eager,
    pytestmark,
    test_a_turn_that_comes_in_the_midst_of_it,
    test_more_of_them_than_memory,
    test_the_next_turn_finds_all_of_it_in_prefills_own_cache,
)
