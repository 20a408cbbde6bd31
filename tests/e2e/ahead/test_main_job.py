"""Returns, answers that end by themselves, and clients that go away."""

from __future__ import annotations

from kvshuttle.localstack import ChatClient, Engine
from tests.e2e.conftest import Cluster
from tests.e2e.steps import turn
from tests.e2e.test_main_job import (  # noqa: F401
    pytestmark,
    test_a_client_that_goes_away_strands_nothing,
    test_a_corrupted_block_is_seen_by_the_oracle,
    test_a_rewritten_history_returns_the_common_prefix_only,
    test_many_choices_of_one_request,
    test_more_held_sessions_than_memory,
    test_the_last_block_moves_too_though_it_is_not_full,
    test_the_same_session_twice_at_once,
    test_with_prefills_cache_cold_all_comes_back,
)
from tests.support.conversation import Conversation, Oracle, differences


def test_the_engines_schedule_ahead(cluster: Cluster) -> None:
    """Else this folder shows nothing."""
    for engine in (cluster.prefill, cluster.decode):
        assert "Batch queue is enabled with size 2" in engine.log_path.read_text(errors="replace")


def test_an_answer_that_ends_by_itself(cluster: Cluster, oracle: Oracle, plain: Engine) -> None:
    """Its end is seen when the step after is under way: that one computes a token too many, into
    the block that comes back."""
    talk = Conversation("ahead-ends", seed=4_711)
    with ChatClient(plain.url) as alone:
        for number in range(4):
            messages = talk.say(90 + number)
            stop = [alone.ask(messages, max_tokens=16).token_ids[7]]
            expected = alone.ask(messages, max_tokens=16, stop_token_ids=stop)
            answer = cluster.client.ask(
                messages, session=talk.session, max_tokens=16, stop_token_ids=stop
            )
            assert differences(answer, expected) == []
            assert answer.finish_reason == "stop"
            talk.heard(answer)
            cluster.forget_prefill()
    assert turn(cluster, oracle, talk) > 0
