"""Collectives of ranks on one host through shared memory; gloo does everything else."""
