"""Campaigns of seeded faults: mutated plans, checkpoints and command lines, and strangers.

    python -m benchmarks.faults plans --count 10000
    python -m benchmarks.faults checkpoints --count 1000
    python -m benchmarks.faults commands --count 500
    python -m benchmarks.faults strangers --count 100

Each prints what came of how many, and exits with 1 if anything was wrong, raw or did not end.
SECURITY.md says what this holds to.
"""
