"""A trained module -> an artefact directory."""
