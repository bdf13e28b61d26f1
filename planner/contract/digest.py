"""The digest of a plan: so that an edit is noticed, not who made it (see SECURITY.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
"""The key of a plan that holds it, and the only one that it does not speak of."""


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a plan's content as canonical JSON: sorted keys, no spaces, ASCII alone."""
    rest = {key: value for key, value in content.items() if key != DIGEST}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
