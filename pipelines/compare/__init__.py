"""Stage `compare`."""
