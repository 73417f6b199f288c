"""What answered questions of ours; nothing in the product imports it. Run as `python -m pipelines.studies.NAME`."""
