"""How many tokens of an example call stand for an image, by what the model makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from shardwright.planner.trace.runs.example_calls import example_call

IMAGE, SIZE, PATCH, WIDTH = 7, 32, 8, 16
PATCHES = (SIZE // PATCH) ** 2


class Sees(nn.Module):
    """Its features of images are one vector for each patch, in an output that `seen` makes."""

    main_input_name = "input_ids"

    def __init__(self, seen: Any) -> None:
        super().__init__()
        said: dict[str, Any] = {"image_token_id": IMAGE, "image_size": SIZE, "num_channels": 3}
        self.config = PretrainedConfig(**said)
        self.embed, self.patches = nn.Embedding(50, WIDTH), nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.seen = seen

    def get_image_features(self, pixel_values: Tensor) -> Any:
        return self.seen(self.patches(pixel_values).flatten(2).transpose(1, 2))

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            made = self.patches(pixel_values).flatten(2).transpose(1, 2)
            x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), made)
        return x


@dataclass
class Output(ModelOutput):
    """An output that has a field for `pooler_output`, filled or not."""

    last_hidden_state: Any = None
    hidden_states: Any = None
    pooler_output: Any = None
    deepstack: Any = None


def pooled(x: Tensor) -> Any:
    return Output(last_hidden_state=torch.cat([x, x], 1), pooler_output=x)


def by_layer(x: Tensor) -> Any:
    """What is added behind two layers, each a list with an entry for an image."""
    return Output(hidden_states=(x, x, x), deepstack=[(0, [*x]), (2, [*x])])


@pytest.mark.parametrize("seen", [lambda x: x, pooled, by_layer])
def test_there_is_a_token_for_each_vector_of_an_image(seen: Any) -> None:
    inputs = example_call(Sees(seen).to("meta"))
    assert (inputs["input_ids"] == IMAGE).sum(1).tolist() == [PATCHES] * 3
