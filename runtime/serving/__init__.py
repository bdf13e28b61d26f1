"""A server of OpenAI's endpoints over a split model: what the ranks of `shardwright serve` run."""
