"""What all stages share: files, provenance, MLflow, the terminal, prompts, statistics."""
