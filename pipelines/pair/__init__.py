"""Stage `pair`: the pair is loaded here; and the prompts."""
