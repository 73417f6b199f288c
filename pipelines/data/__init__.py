"""Stage `data`: texts, their labels and features, into Parquet shards; by one process or many workers."""
