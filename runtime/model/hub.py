"""How a model is fetched and whether its code may run, as in `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from shardwright.errors import UsageError


class Hub(NamedTuple):
    """Where and how a Hub id is resolved, and whether code that comes with the model may run.

    Attributes:
        revision: Branch, tag or commit; "main" by default.
        cache_dir: Folder for downloads; the Hub's own cache by default.
        local_files_only: Whether to use only files that are already downloaded.
        token: The access token, or whether to use the one that `hf auth login` stored.
        subfolder: The model in a pipeline that is meant, as `transformer`; of directories, too.
        trust_remote_code: Whether to run code that comes with the model; of directories, too.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    token: str | bool | None = None
    subfolder: str | None = None
    trust_remote_code: bool | None = False

    def options(self) -> dict[str, Any]:
        """Return the options that are set, under transformers' names, for downloads alone."""
        every = self._replace(subfolder=None, trust_remote_code=None)._asdict().items()
        given = {k: v for k, v in every if v is not None and v is not False}
        return given | ({"token": False} if self.token is False else {})

    @property
    def trusted(self) -> bool:
        """Whether code may run; None is no, where transformers would prompt on the terminal.

        Raises:
            UsageError: it is neither True nor False, as "no" is, which would count as true.
        """
        if not isinstance(self.trust_remote_code, bool | None):
            given = f"{self.trust_remote_code!r:.60}"
            raise UsageError(f"trust_remote_code must be True or False, not {given}")
        return bool(self.trust_remote_code)

    @property
    def at(self) -> str:
        """Return the revision for messages; empty if it is the default."""
        return f" at revision {self.revision}" if self.revision else ""

    def __repr__(self) -> str:
        """Hide the token, which must not appear in logs."""
        shown = self._asdict() | {"token": None if self.token is None else "..."}
        return f"Hub({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


USUAL = Hub()
"""The default options."""
