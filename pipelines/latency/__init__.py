"""Stage `latency`: this machine's times of passes, verification, labelling and decisions."""
