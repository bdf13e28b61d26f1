"""What each rank of `test_batching` does."""
# pyright: reportAttributeAccessIssue=false

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
)

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan

PROMPTS = [[*range(3, 21), 7], [5, 6, 7], [*range(3, 20), 9, 8], [40, 30, 20, 10], [11] * 9]
"""Two of them begin alike for more than a page of the cache."""
NEW = 6
ROOM: Any = {"page_size": 8, "num_blocks": 8, "max_batch_tokens": 24}
"""Less than all prompts need at once."""
ASKED = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
CONFIGS = {
    "key heads that are shared": LlamaConfig(**COMMON, num_key_value_heads=2),
    "eager attention": LlamaConfig(**COMMON, num_key_value_heads=3, **EAGER),
    "sliding windows": MistralConfig(**COMMON, num_key_value_heads=1, sliding_window=6),
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def split(config: Any, plan: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return shardwright.apply(made(config), Plan.from_json(plan), mesh)


def generated(whole: Any) -> list[list[int]]:
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return [whole.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in PROMPTS]


def come_wait_and_leave(model: Any, want: list[list[int]]) -> None:
    """A request is cancelled, and another one comes later."""
    config = ContinuousBatchingConfig(**ROOM)
    how = {"generation_config": ASKED, "continuous_batching_config": config}
    with model.continuous_batching_context_manager(**how) as manager:
        if manager.is_tp_driver:
            manager.add_request([3, 4, 5], "gone", max_new_tokens=40, streaming=True)
            while manager.get_result(timeout=1) is None:
                pass
            manager.cancel_request("gone")
            manager.add_request(PROMPTS[1], "comes later")
        while (one := manager.get_result("comes later", timeout=1)) is None:
            time.sleep(0.01)  # all ranks get all results; the first that leaves ends the manager
        assert one.generated_tokens == want[1]


def main(plans: dict[str, str], unproven: str) -> None:
    """Compare the models by their plans; `unproven` is a plan without continuous batching."""
    dist.init_process_group("gloo")
    ids = torch.tensor([PROMPTS[0]])
    for name, config in CONFIGS.items():
        print(name, flush=True)
        model, whole = split(config, plans[name]), made(config)
        want = generated(whole)
        found = model.generate_batch(PROMPTS, ASKED, ContinuousBatchingConfig(**ROOM))
        assert [one.generated_tokens for one in found.values()] == want
        come_wait_and_leave(model, want)
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, rtol=0, atol=1e-9)
    model = split(CONFIGS["sliding windows"], unproven)
    with pytest.raises(UsageError, match="not proven for continuous batching: plan it with"):
        model.generate_batch(PROMPTS, ASKED)
    dist.barrier()
    dist.destroy_process_group()
