"""Stage `export`: the artefact, checked against the trained module, and its registered version."""
