"""Stage `pair`: loads and checks the pair, and writes the prompts."""
