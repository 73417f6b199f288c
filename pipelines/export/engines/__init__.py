"""How long the chains of the engines of today should be, by batch size, in the files that they read."""
