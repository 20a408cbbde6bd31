"""The hash of a block that is not full, of vLLM's own requests: equal only where KV is equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

BLOCK = 16
WORDS = list(range(100, 100 + 2 * BLOCK + 9))
FULL = 2


def hasher() -> Any:
    from kvshuttle.dataplane.vllm_compat import TailHasher

    cache = SimpleNamespace(prefix_caching_hash_algo="sha256", block_size=BLOCK)
    config: Any = SimpleNamespace(cache_config=cache)
    return TailHasher(config)


def request(
    tokens: list[int], salt: str | None = None, lora: str = "", image: str = "", at: int = 33
) -> Any:
    """As the engine makes it. An image's tokens are placeholders, equal for all images."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    features = None
    if image:
        place = PlaceholderRange(offset=at, length=4)
        features = [
            MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)
        ]
    return Request(
        request_id="r",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        cache_salt=salt,
        lora_request=LoRARequest(lora, 1, f"/adapters/{lora}") if lora else None,
        mm_features=features,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )


def tail(tokens: list[int] = WORDS, count: int = 5, **more: Any) -> bytes | None:
    return hasher().of(request(tokens, **more))(FULL, count)  # type: ignore[no-any-return]


def test_it_is_what_vllm_makes_of_a_full_block_of_these_tokens() -> None:
    """Cut after as many tokens, a chain of blocks of that size has it as its third hash."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    found = tail(count=9)
    whole = request(WORDS)
    parent = whole.block_hashes[FULL - 1]
    assert found == hash_block_tokens(get_hash_fn_by_name("sha256"), parent, WORDS[2 * BLOCK :])
    # Full, it would be this request's own.
    longer = request([*WORDS, *range(200, 207)])
    own = hash_block_tokens(
        get_hash_fn_by_name("sha256"), parent, [*WORDS[2 * BLOCK :], *range(200, 207)]
    )
    assert own == longer.block_hashes[FULL]


def test_a_longer_request_with_the_same_start_has_the_same() -> None:
    answered = request(WORDS[: 2 * BLOCK + 3])
    answered.append_output_token_ids(WORDS[2 * BLOCK + 3 : 2 * BLOCK + 6])
    assert hasher().of(answered)(FULL, 5) == tail() is not None


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": [*WORDS[:-5], 7, *WORDS[-4:]]},
        {"tokens": [7, *WORDS[1:]]},
        {"count": 4},
        {"count": 6},
        {"salt": "mine"},
        {"lora": "adapter"},
        {"image": "cat"},
    ],
    ids=["token", "first-token", "shorter", "longer", "salt", "lora", "image"],
)
def test_what_changes_the_kv_changes_it(other: dict[str, Any]) -> None:
    assert tail() != tail(**other) is not None


def test_salts_adapters_and_images_are_told_apart() -> None:
    found = [
        tail(salt="one"),
        tail(salt="two"),
        tail(lora="one"),
        tail(lora="two"),
        tail(image="cat"),
        tail(image="dog"),
        tail(image="cat", at=34),
        # It reaches over the end of what is there.
        tail(image="cat", at=36),
    ]
    assert None not in found
    assert len(set(found)) == len(found)
    # What comes after these tokens does not count, and the blocks before have theirs.
    assert tail(image="cat", at=37) == tail()
    assert tail(image="cat", at=0) != tail()


def test_a_request_that_has_not_so_many_tokens_has_none() -> None:
    assert tail(WORDS[:-5], 4) is not None
    assert tail(WORDS[:-5], 5) is None
    assert tail(WORDS, 0) is None
    assert tail([*WORDS, *WORDS], BLOCK) is None
    assert hasher().of(request(WORDS))(3, 2) is None
    assert hasher().of(request(WORDS))(0, 2) is None


@pytest.mark.parametrize(
    ("computed", "in_flight", "blocks", "tokens"),
    [
        (2 * BLOCK + 9, 0, 3, 9),
        # The last token that was sampled has no KV, nor what a step is writing.
        (2 * BLOCK + 8, 0, 3, 8),
        (2 * BLOCK + 9, 4, 3, 5),
        (2 * BLOCK + 9, 9, 3, 0),
        (2 * BLOCK, 0, 2, 0),
        # Preempted: nothing is computed, and its blocks are gone.
        (0, 0, 0, 0),
        (2 * BLOCK + 9, 0, 2, 0),
        (BLOCK + 3, 0, 2, 3),
    ],
)
def test_only_what_is_written_counts(
    computed: int, in_flight: int, blocks: int, tokens: int
) -> None:
    from kvshuttle.dataplane.vllm_compat import finished_state

    ending = request(WORDS)
    ending.num_computed_tokens = computed
    ending.num_in_flight_tokens = in_flight
    state = finished_state(ending, list(range(50, 50 + blocks)), BLOCK, hasher())
    full = (computed - in_flight) // BLOCK
    assert state.block_ids == tuple(range(50, 50 + min(full, blocks)))
    if not tokens:
        assert state.tail is None
        return
    assert state.tail is not None
    assert (state.tail.block_id, state.tail.tokens) == (50 + full, tokens)
    assert state.tail.hash == hasher().of(request(WORDS))(full, tokens)
