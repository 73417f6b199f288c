"""The pair of models: loading, caches, masks, sampling."""
