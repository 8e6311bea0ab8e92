"""Tiny random checkpoints on disk, made by numpy alone: a Llama target and a DFlash drafter that fits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXTENSIONS = ("next_token", "context_start", "slot_embeddings", "markov_head")
"""What a drafter may do beyond z-lab's format."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>")


@dataclass(frozen=True)
class TinyShape:
    """Shape of a tiny target; the vocabulary is 4 special tokens and 256 bytes, padded to ``vocab``."""

    layers: int = 3
    hidden: int = 64
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 272
    context: int = 512
    tied: bool = False
    seed: int = 0


def byte_tokenizer() -> Tokenizer:
    """Special tokens, then one token per byte; no merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_target(directory: Path, shape: TinyShape = TinyShape()) -> Path:
    """Write a Hugging Face directory of a random LlamaForCausalLM."""
    rng = np.random.default_rng(shape.seed)
    h, f, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def normal(*size: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size) * scale / np.sqrt(size[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": (0.5 * rng.standard_normal((shape.vocab, h))).astype(np.float32)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": rng.uniform(0.5, 1.5, h).astype(np.float32),
            f"{at}.post_attention_layernorm.weight": rng.uniform(0.5, 1.5, h).astype(np.float32),
            f"{at}.self_attn.q_proj.weight": normal(q, h, scale=1.5),
            f"{at}.self_attn.k_proj.weight": normal(kv, h, scale=1.5),
            f"{at}.self_attn.v_proj.weight": normal(kv, h),
            f"{at}.self_attn.o_proj.weight": normal(h, q),
            f"{at}.mlp.gate_proj.weight": normal(f, h),
            f"{at}.mlp.up_proj.weight": normal(f, h),
            f"{at}.mlp.down_proj.weight": normal(h, f),
        }
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, h).astype(np.float32)
    if not shape.tied:
        tensors["lm_head.weight"] = normal(shape.vocab, h, scale=3.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 2,
        "bos_token_id": 0,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def write_drafter(
    directory: Path,
    shape: TinyShape = TinyShape(),
    *,
    block_size: int = 6,
    taps: tuple[int, ...] = (0, 2),
    layers: int = 2,
    draft_vocab: int | None = None,
    extensions: Sequence[str] = (),
    seed: int = 1,
) -> Path:
    """Write a random DFlash drafter in z-lab's format; ``draft_vocab`` makes a reduced vocabulary with d2t and t2d,
    ``extensions`` are those of ours that are on.
    """
    rng = np.random.default_rng(seed)
    h, f, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def normal(*size: int) -> np.ndarray:
        return (rng.standard_normal(size) / np.sqrt(size[-1])).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {"fc.weight": normal(h, len(taps) * h), "hidden_norm.weight": norm(h), "norm.weight": norm(h)}
    for layer in range(layers):
        at = f"layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(h),
            f"{at}.post_attention_layernorm.weight": norm(h),
            f"{at}.self_attn.q_proj.weight": normal(q, h),
            f"{at}.self_attn.k_proj.weight": normal(kv, h),
            f"{at}.self_attn.v_proj.weight": normal(kv, h),
            f"{at}.self_attn.o_proj.weight": normal(h, q),
            f"{at}.self_attn.q_norm.weight": norm(shape.head_dim),
            f"{at}.self_attn.k_norm.weight": norm(shape.head_dim),
            f"{at}.mlp.gate_proj.weight": normal(f, h),
            f"{at}.mlp.up_proj.weight": normal(f, h),
            f"{at}.mlp.down_proj.weight": normal(h, f),
        }
    if "context_start" in extensions:
        tensors |= {"start.weight": normal(h, len(taps) * h), "start_embed.weight": normal(h, h)}
    if "slot_embeddings" in extensions:
        tensors["slot_embeddings.weight"] = normal(block_size, h)
    if "markov_head" in extensions:
        tensors |= {f"markov.{side}_proj.weight": normal(h, 2 * h) for side in ("gate", "up")}
        tensors["markov.down_proj.weight"] = normal(h, h)
    if draft_vocab is not None:
        ids = np.sort(rng.choice(260, draft_vocab, replace=False)).astype(np.int64)
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(shape.vocab), ids)
    dflash: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": list(taps)}
    if extensions:
        dflash["extensions"] = dict.fromkeys(extensions, True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "num_target_layers": shape.layers,
        "block_size": block_size,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": dflash,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def edit_config(directory: Path, **changes: Any) -> Path:
    """Change keys of a checkpoint's config.json; None takes a key away."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def write_simple_target(directory: Path, shape: TinyShape = TinyShape()) -> Path:
    """A random target whose layers say little, so that the next token is nearly a function of the last: a little
    training learns that.
    """
    write_target(directory, shape)
    tensors = load_file(directory / "model.safetensors")
    quiet = {name: 0.05 * tensors[name] for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))}
    return edit_tensors(directory, quiet)


def edit_tensors(directory: Path, changes: Mapping[str, np.ndarray | None]) -> Path:
    """Change or add tensors of a checkpoint; None takes one away."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: array for name, array in tensors.items() if array is not None}, path)
    return directory
