"""Tensors that are given memory by block lie apart, and outlive what gave it."""

import gc

import torch

from shardwright.runtime.checkpoint.memory import BLOCK, MIN_BYTES, Room


def test_tensors_of_a_block_lie_apart() -> None:
    room = Room(torch.device("cpu"))
    wanted = [
        ((MIN_BYTES + 1,), torch.bool),  # the next begins where it may
        ((MIN_BYTES, 3), torch.float64),
        ((2, 3), torch.float32),  # too little for a block
        ((0, 5), torch.bfloat16),
        ((MIN_BYTES, 1, 5), torch.bfloat16),
        ((BLOCK // 4 + 1,), torch.int32),  # more than a block
        ((MIN_BYTES,), torch.complex64),
    ]
    made = [room.take(shape, dtype) for shape, dtype in wanted]
    for i, tensor in enumerate(made):
        tensor.fill_(i % 2 if tensor.dtype == torch.bool else i)
    room.trim()
    del room
    gc.collect()
    for i, (tensor, (shape, dtype)) in enumerate(zip(made, wanted, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
        assert (tensor == (i % 2 if dtype == torch.bool else i)).all(), "another wrote here"


def test_elsewhere_torch_gives_memory() -> None:
    assert Room(torch.device("meta")).take([MIN_BYTES, 4], torch.float32).is_meta
