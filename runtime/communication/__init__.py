"""The mesh of ranks, the collectives between them, and what all of them have alike."""
