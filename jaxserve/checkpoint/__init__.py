"""A name or a path in; a config, a tokenizer and host tensors out."""
