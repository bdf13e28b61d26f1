"""A planned model in vLLM itself, where that is installed."""

from importlib.util import find_spec

import pytest

from benchmarks.vllm_ranks import compared


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_tokens_are_those_of_one_rank() -> None:
    row = compared("stablelm")
    assert row["vllm on 1"] == "runs" and row["planned on 2"] == "equal"
    assert row["share"] <= 0.53
