"""Collectives of ranks on one host, through memory that they share; gloo does all the rest."""
