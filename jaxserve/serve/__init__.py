"""The outside world: text, protocol, the async bridge and the HTTP app. No jax."""
