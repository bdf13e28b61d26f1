"""Arguments as they were before a module around changed them, for hooks and newcomers within.

The code of a module that takes such a tensor takes it as it begins (`LocalState.enter`). Hooks on
the module come earlier, and what was put in its place knows nothing of it: they are called with it.
"""

from __future__ import annotations

from typing import Any

from shardwright.runtime.outside.hooks import is_inside


class TakesOriginals:
    """Mixin in front of a module that takes a tensor as it was outside of a module around."""

    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in torch; where somebody sees the arguments, they are what the module takes."""
        split = self.__dict__.get("_shardwright")
        state = split or self._shardwright_unchanged
        hooked = (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        )
        if (split is not None and not hooked) or not is_inside(state):
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        args = state.originals(args, kwargs)
        if split is None:
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        split.has_originals = True
        try:
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        finally:
            split.has_originals = False
