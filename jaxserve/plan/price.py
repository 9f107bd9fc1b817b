"""What a step costs by arithmetic: bytes of memory traffic, and the time they need at least.

Counted are the weights, each read once a step, and the K/V read and written. Activations, scores
and block tables are left out: they are small beside these at the batch sizes decode runs at. A
sliding window is not modelled; the cells it spares are the caller's to leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.plan.batch import ArraySpec


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """Bytes one step moves between memory and the cores."""

    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return ArraySpec((), dtype).nbytes


def layer_parameters(model: ModelConfig) -> int:
    """Elements of one decoder layer: q, k, v, o, gate, up and down, biases and the two norms."""
    d, f, qkv = model.hidden_size, model.intermediate_size, model.q_size + 2 * model.kv_size
    matrices = d * qkv + model.q_size * d + 3 * d * f
    biases = model.qkv_bias * qkv + model.o_bias * d + model.mlp_bias * (2 * f + d)
    return matrices + biases + 2 * d


def num_parameters(model: ModelConfig) -> int:
    """Elements of the whole model; tied embeddings count once."""
    tables = 1 if model.tie_word_embeddings else 2
    table = model.vocab_size * model.hidden_size
    return model.num_layers * layer_parameters(model) + model.hidden_size + tables * table


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes the weights take on the device."""
    return num_parameters(model) * itemsize(dtype)


def kv_bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """K and V of one token over all layers, bytes."""
    return 2 * model.num_layers * model.kv_size * itemsize(dtype)


def step_weight_bytes(model: ModelConfig, tokens: int, dtype: str) -> int:
    """Weight bytes a step of ``tokens`` tokens reads.

    Every layer and the output table in full; of the input table, tied to it or not, one row a
    token.
    """
    table = model.vocab_size * model.hidden_size
    layers = model.num_layers * layer_parameters(model)
    return (layers + model.hidden_size * (1 + tokens) + table) * itemsize(dtype)


def decode_traffic(model: ModelConfig, *, rows: int, cells: int, dtype: str) -> StepTraffic:
    """Traffic of a decode step of ``rows`` rows whose read touches ``cells`` (row, key) pairs.

    ``cells`` is DecodeBuckets.cells_for. The rectangle read also writes what it gathers and reads
    it again where the compiler does not fuse the two; that is not counted.
    """
    per_token = kv_bytes_per_token(model, dtype)
    return StepTraffic(
        weight_bytes=step_weight_bytes(model, rows, dtype),
        kv_read_bytes=cells * per_token,
        kv_write_bytes=rows * per_token,
    )


def prefill_traffic(model: ModelConfig, *, tokens: int, context: int, dtype: str) -> StepTraffic:
    """Traffic of a prefill step of ``tokens`` new tokens over ``context`` keys, new ones included.

    Each key is counted once, as if a segment's queries shared one pass. Prefill is more often bound
    by arithmetic than by memory, so this is a floor.
    """
    per_token = kv_bytes_per_token(model, dtype)
    return StepTraffic(
        weight_bytes=step_weight_bytes(model, tokens, dtype),
        kv_read_bytes=context * per_token,
        kv_write_bytes=tokens * per_token,
    )


def roofline_seconds(traffic: StepTraffic, bytes_per_second: float) -> float:
    """The time the traffic takes at a sustained bandwidth; no step is faster."""
    return traffic.total_bytes / bytes_per_second
