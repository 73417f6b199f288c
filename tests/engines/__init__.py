"""Studies in which a selector decides inside a real engine."""
