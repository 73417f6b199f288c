"""Stage `latency`: this machine's times of forward passes, verification and decisions."""
