"""How heavy work is kept: a cache by content, worker processes, tables with provenance, checkpoints."""
