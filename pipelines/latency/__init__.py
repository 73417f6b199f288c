"""Stage `latency`: this machine's times of passes, verification and decisions."""
