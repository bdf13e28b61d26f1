"""For tests of rules: `check_rule`."""

from .check import check_rule

__all__ = ["check_rule"]
