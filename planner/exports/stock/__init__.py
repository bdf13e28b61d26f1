"""Exports plans as tables of transformers' own styles, as torch's styles, and for vLLM."""
