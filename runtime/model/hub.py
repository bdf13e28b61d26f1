"""What of the Hugging Face Hub is meant: the options that transformers' `from_pretrained` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class Hub(NamedTuple):
    """Where a hub id leads.

    Attributes:
        revision: Branch, tag or commit; by default "main".
        cache_dir: Folder that downloads are kept in; by default the Hub's own.
        local_files_only: Whether to use what is there already, and fetch nothing.
        token: Of who asks, or whether to use the one that `hf auth login` stored.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    token: str | bool | None = None

    def options(self) -> dict[str, Any]:
        """Those that are given, by the names that transformers has for them."""
        given = {k: v for k, v in self._asdict().items() if v is not None and v is not False}
        return given | ({"token": False} if self.token is False else {})

    @property
    def at(self) -> str:
        """The revision, for messages; empty for the usual one."""
        return f" at revision {self.revision}" if self.revision else ""

    def __repr__(self) -> str:
        """Without the token: nobody should read that in a log."""
        shown = self._asdict() | {"token": None if self.token is None else "..."}
        return f"Hub({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


USUAL = Hub()
"""What is meant where nothing is said."""
