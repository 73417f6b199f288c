"""Stage `pair`: the embedded pair is trained here, any other one is loaded; and the prompts."""
