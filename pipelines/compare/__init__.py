"""Stage `compare`: the papers' tables, from a run's traces."""
