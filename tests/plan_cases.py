"""What the tests of plans share: a model of all roles, and how texts are pinned."""

import textwrap

import torch
from torch import nn

from mfsdp.planning import Role, ShardPlan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


class GPT(nn.Module):
    """``width`` equal to the context length and the vocabulary is a trap for guessing heads by size."""

    def __init__(self, layers: int = 2, width: int = 64, vocab: int = 96, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)
        if tied:
            self.logits.weight = self.embed.weight


def gpt(layers: int = 2, *, device: str = "meta", tied: bool = False, vocab: int = 96) -> GPT:
    with torch.device(device):
        return GPT(layers, vocab=vocab, tied=tied)


def wrapped(text: object) -> str:
    """``text`` in lines that fit this file."""
    return "\n".join(textwrap.fill(line, 92, subsequent_indent="  ") for line in str(text).splitlines())


def roles(made: ShardPlan) -> dict[str, Role]:
    return {name: entry.role for name, entry in made.entries.items()}
