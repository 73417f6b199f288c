"""Labels along a text: what every tree would have yielded at every position."""

from data_gen.text_labels.labels import label_text

__all__ = ["label_text"]
