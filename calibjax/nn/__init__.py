"""Building blocks of the decoder and of heads: transformer blocks, attention, the key/value cache."""
