"""Stage `data`: texts, numbers of both models' rows and labels, into Parquet shards."""
