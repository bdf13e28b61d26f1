"""Tensor-parallel tables that people wrote: priced as ours are, audited, shown beside ours."""
