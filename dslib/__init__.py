"""Recent methods of large language models, written to be read, tested and measured.

Rooms: ``optim``, ``attention``, ``models``, ``tasks``, ``rl``, ``evaluation``, ``agents``, ``kernels``, ``data``,
and the two that serve the notebooks, ``suite`` and ``notebook``. Importing ``dslib`` itself
imports none of them, so it costs nothing.
"""

__version__ = "0.1.0"
