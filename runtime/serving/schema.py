"""What clients send, as OpenAI's API has it. What the server cannot do is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Zero = Annotated[float, Field(ge=0, le=0)]
Text = Annotated[str, Field(max_length=2**20)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Request(BaseModel):
    """What both endpoints take.

    Below the blank line are fields that only may have the value that changes nothing, and fields
    that say who asks.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Literal[1] | None = None
    seed: None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def stops(self) -> list[str]:
        """The texts at which generation stops."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most(self) -> int | None:
        """The most tokens to generate."""
        return self.max_tokens


class Completion(Request):
    """A text to continue, or its tokens."""

    prompt: Text | Annotated[list[int], Field(min_length=1)]

    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its content as one text, as chat templates take it."""
        whole = self.content
        text = whole if isinstance(whole, str) else "\n".join(part.text for part in whole)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class Chat(Request):
    """A chat to continue."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None

    @property
    def most(self) -> int | None:
        """The most tokens to generate."""
        return self.max_completion_tokens or self.max_tokens
