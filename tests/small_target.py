"""A small Llama, trained here from nothing on the Python library's own sources: a target for `dflash-ort distill`.

    python -m tests.small_target DIRECTORY [--minutes 10]

Writes a Hugging Face directory, ``DIRECTORY/model``, and two prompt files of raw text that it was not trained on:
``train.jsonl``, for a drafter to learn from, and ``held-out.jsonl``, to judge it (docs/narrow-traffic.md shows the
commands, docs/log.md what came of it). Needs the extra ``dev`` (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path
from time import perf_counter

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
CONTEXT = 256
BATCH = 16
PROMPT_CHARACTERS = 300
BOS, EOS = 0, 1


def sources(seed: int = 0) -> tuple[list[str], list[str]]:
    """The library's modules, for training and for prompts, in an order that depends on ``seed`` alone."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    texts = [
        text
        for path in files
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts)
        and 2_000 < len(text := path.read_text("utf-8", errors="ignore")) < 200_000
    ]
    random.Random(seed).shuffle(texts)
    held = len(texts) // 5
    return texts[held:], texts[:held]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(texts: list[str], tokenizer: Tokenizer, minutes: float) -> LlamaForCausalLM:
    """AdamW with a cosine to nothing over the minutes."""
    torch.manual_seed(0)
    ids = torch.tensor([token for text in texts for token in [BOS, *tokenizer.encode(text).ids, EOS]])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    began, step = perf_counter(), 0
    while (done := (perf_counter() - began) / (60 * minutes)) < 1:
        rate = min(step / 50, 1.0) * 0.5 * (1 + torch.cos(torch.tensor(done * torch.pi)).item())
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate
        starts = torch.randint(0, len(ids) - CONTEXT, (BATCH,))
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.3f}, {done:.0%}", flush=True)
    return model


def write_prompts(path: Path, texts: list[str], count: int, seed: int) -> None:
    """Pieces of modules, each to be gone on with. There is no chat template, so one turn is the text itself."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = rng.choice(texts)
            start = rng.randrange(len(text) - PROMPT_CHARACTERS)
            piece = text[start : start + PROMPT_CHARACTERS]
            file.write(json.dumps({"suite": "python", "id": f"{path.stem}-{number}", "turns": [piece]}) + "\n")


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    texts, held = sources()
    tokenizer = make_tokenizer(texts)
    model = train(texts, tokenizer, arguments.minutes)
    directory = arguments.directory / "model"
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    half = len(held) // 2
    write_prompts(arguments.directory / "train.jsonl", held[:half], 600, 1)
    write_prompts(arguments.directory / "held-out.jsonl", held[half:], 40, 2)


if __name__ == "__main__":
    main()
