"""`check_rule`, which tests a rule."""

from .check import check_rule

__all__ = ["check_rule"]
