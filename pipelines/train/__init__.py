"""Stage `train`: selectors on the traces, judged by replay."""
