"""The mesh of ranks, the collectives between them, and checks that ranks agree."""
