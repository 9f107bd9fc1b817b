"""Write the golden outputs with torch and transformers; never needed to run the tests.

In a virtual environment of its own (Python 3.11; the exact torch pin is the CPU build):

    pip install torch==2.13.0 && pip install transformers safetensors gguf accelerate
    python tests/golden/regenerate.py families
    python tests/golden/regenerate.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf

``families`` fills families/*/golden.npz (format: weights.py). ``smollm2`` fills smollm2.json: the
GGUF file dequantised to float32 by transformers, and for each case ``text``, ``prompt_token_ids``,
48 ``greedy_token_ids`` (with the two most likely tokens' logits at each step at least
``min_margin`` apart) and the ``top_logits`` [id, logit] after the prompt.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from weights import FAMILIES, HERE, draw_tensors, family_config, weights_sha256, write_checkpoint

PROMPT_LENGTHS = (1, 7, 29, 80)
GREEDY_TOKENS = 16
LEAST_MARGIN = 1e-3  # of logits; below it float32 noise could turn a greedy token

CHAT = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 10.",
    "¿Cómo se dice 'good morning' en español? Réponds aussi en français: ça va? 你好 🙂",
)
PLAIN = (
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "In 1969, 2 astronauts walked on the Moon. It was",
    "Once upon a time, in a village by the river, there lived an old clockmaker who",
)
SMOLLM2_TOKENS = 48


def greedy(
    model: torch.nn.Module, prompt: list[int], n: int
) -> tuple[np.ndarray, list[int], float]:
    """Logits of the prompt [T, V], n greedy tokens, and the least gap between the best two.

    Every token is one whole forward pass: no cache takes part in what is called true.
    """
    tokens, prompt_logits, margin = list(prompt), None, float("inf")
    with torch.inference_mode():
        for _ in range(n):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            if prompt_logits is None:
                prompt_logits = logits.numpy()
            best = logits[-1].topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    assert prompt_logits is not None
    return prompt_logits, tokens[len(prompt) :], margin


def family_arrays(family: str) -> dict[str, np.ndarray]:
    """What golden.npz of a family holds. Raises when a margin is too small to be trusted."""
    config = family_config(family)
    with tempfile.TemporaryDirectory() as tmp:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            write_checkpoint(Path(tmp), family),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    faults = {k: v for k, v in info.items() if v}
    if faults:
        raise SystemExit(f"{family}: {faults}")
    model.eval()
    out = {"weights_sha256": np.array(weights_sha256(draw_tensors(config)))}
    rng = np.random.default_rng(0)
    for i, length in enumerate(PROMPT_LENGTHS):
        for _ in range(100):  # until no step is a near tie
            prompt = rng.integers(4, config["vocab_size"], length).tolist()
            logits, tokens, margin = greedy(model, prompt, GREEDY_TOKENS)
            if margin >= LEAST_MARGIN:
                break
        else:
            raise SystemExit(f"{family}: no prompt with margins of {LEAST_MARGIN}")
        positions = np.unique(np.linspace(0, length - 1, 6).astype(np.int32))
        out[f"prompt_{i}"] = np.array(prompt, np.int32)
        out[f"positions_{i}"] = positions
        out[f"logits_{i}"] = logits[positions]
        out[f"greedy_{i}"] = np.array(tokens, np.int32)
    return out


def smollm2_cases(path: Path) -> list[dict]:
    """What smollm2.json holds."""
    kwargs = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **kwargs)
    # transformers ignores tokenizer.ggml.pre; "smollm" splits every digit before anything else.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **kwargs
    ).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        for message in CHAT
    ] + list(PLAIN)
    cases = []
    for text in texts:
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        logits, tokens, margin = greedy(model, prompt, SMOLLM2_TOKENS)
        top = torch.tensor(logits[-1]).topk(8)
        cases.append(
            {
                "text": text,
                "prompt_token_ids": prompt,
                "greedy_token_ids": tokens,
                "min_margin": round(margin, 5),
                "top_logits": [
                    [int(i), round(float(x), 5)]
                    for i, x in zip(top.indices, top.values, strict=True)
                ],
            }
        )
        print(f"{margin:.4f} {text!r} -> {tokenizer.decode(tokens)!r}")
    return cases


def main(argv: list[str]) -> None:
    """See the top."""
    torch.manual_seed(0)
    if argv == ["families"]:
        for family in FAMILIES:
            arrays = family_arrays(family)
            np.savez_compressed(HERE / "families" / family / "golden.npz", **arrays)
            print(family, float(np.abs(arrays["logits_3"]).max()))
    elif len(argv) == 2 and argv[0] == "smollm2":
        cases = smollm2_cases(Path(argv[1]))
        text = json.dumps(cases, ensure_ascii=False, indent=1)
        (HERE / "smollm2.json").write_text(text + "\n", encoding="utf-8")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
