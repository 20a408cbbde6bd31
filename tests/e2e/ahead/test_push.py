"""Pushes, of prompts in chunks too."""

from tests.e2e.test_push import (  # noqa: F401
    pushing,
    pytestmark,
    test_a_client_that_goes_away_strands_nothing,
    test_a_client_that_goes_away_while_it_is_written,
    test_a_corrupted_block_is_seen_by_the_oracle,
    test_a_prompt_in_chunks,
    test_many_at_once,
    test_turns_are_pushed_and_only_what_decode_lacks,
    test_what_prefill_has_cached_is_written_too,
    test_with_a_return_in_the_same_turn,
)
