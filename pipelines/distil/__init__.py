"""Stage `distil`: trains a draft for a target that has none."""
