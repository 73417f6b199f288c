"""From a trained module to an artefact directory."""
