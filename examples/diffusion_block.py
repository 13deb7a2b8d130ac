"""A block of a diffusion transformer: image tokens are spread over the ranks, every rank holds the text whole.

torchrun --nproc-per-node 4 examples/diffusion_block.py
"""

import torch
from torch import nn

import usp


class Block(nn.Module):
    """Text and image have weights of their own and attend to each other, as in MM-DiT."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleDict({name: nn.Linear(width, 3 * width) for name in ("image", "text")})
        self.out = nn.ModuleDict({name: nn.Linear(width, width) for name in ("image", "text")})

    def forward(self, image, text, mesh, tokens):
        q, k, v = self.qkv["image"](image).unflatten(2, (3, self.heads, -1)).unbind(2)
        text_q, text_k, text_v = self.qkv["text"](text).unflatten(2, (3, self.heads, -1)).unbind(2)
        joint = usp.Joint(text_k, text_v, text_q)  # at positions 0 to text.shape[1], in front of the image
        mask = usp.Mask(causal=False)
        seen, read = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, joint=joint)
        return image + self.out["image"](seen.flatten(2)), text + self.out["text"](read.flatten(2))


mesh = usp.init_mesh(ring=2, ulysses=2)
torch.manual_seed(0)  # weights, image and text are the same on every rank
block, image, text = Block(96, heads=6), torch.randn(1, 1000, 96), torch.randn(1, 77, 96)
tokens = usp.partition(1000, mesh, "contiguous", start=77)
out, text_out = block(usp.shard(image, mesh, tokens), text, mesh, tokens)
loss = out.square().sum() + text_out.square().sum() / 4  # the text is whole on all 4 ranks
loss.backward()  # every gradient is this rank's share: docs/gradients.md
print(f"image {tuple(out.shape)}, text {tuple(text_out.shape)}")
torch.distributed.destroy_process_group()
