"""What vLLM puts into a block's hash, and that the agent matches by nothing else.

Real requests and vLLM's real hasher: adapters and salts that differ make other hashes, so a grant
of one never fits a request of another.
"""

from __future__ import annotations

import pytest

from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.test_scheduler_side import BLOCK, Bench

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TOKENS = 4 * BLOCK + 5
# Adapter's name, number and path; cache salt.
Kind = tuple[tuple[str, int, str] | None, str | None]
KINDS: dict[str, Kind] = {
    "base model": (None, None),
    "an adapter": (("x", 1, "/adapters/x"), None),
    "another adapter": (("y", 2, "/adapters/y"), None),
    "another adapter of that name": (("x", 1, "/adapters/x-2"), None),
    "a salt": (None, "mine"),
    "another salt": (None, "yours"),
    "an adapter with a salt": (("x", 1, "/adapters/x"), "mine"),
}


def chain(kind: Kind) -> tuple[bytes, ...]:
    """The block hashes of the same tokens, asked for in this way."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    adapter, salt = kind
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(TOKENS)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(*adapter) if adapter else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )
    return tuple(bytes(x) for x in request.block_hashes)


def test_a_grant_fits_requests_of_its_own_kind_only() -> None:
    chains = {name: chain(kind) for name, kind in KINDS.items()}
    for granted in KINDS:
        for asks in KINDS:
            bench = Bench()
            bench.expect(types_pb2.LEG_PREFILL, "l1")
            bench.grant(chains[granted])
            key = ("t", types_pb2.LEG_PREFILL)
            found = bench.agent.look("r", key, chains[asks], TOKENS, 0)
            assert found == (4 * BLOCK if granted == asks else 0), (granted, asks)


def test_an_adapter_is_known_by_name_and_path_and_not_by_its_number() -> None:
    """Each engine numbers adapters as it loads them."""
    assert chain((("x", 7, "/adapters/x"), None)) == chain(KINDS["an adapter"])
