"""`shardwright schema`."""

from __future__ import annotations

import json

import click


@click.command(
    short_help="Print the JSON Schema of a plan.",
    epilog="""\b
Examples:
  shardwright schema
  shardwright schema > plan.schema.json
""",
)
def schema() -> None:
    """Print the JSON Schema of a plan."""
    from shardwright.planner.contract.plan_file import Plan

    text = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
    click.echo(json.dumps(text, indent=2, sort_keys=True))
