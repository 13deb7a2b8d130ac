"""A tiny Llama learns a text byte by byte: FSDP2 shards its weights over 8 ranks, usp its sequences over 2 x 2 of them.

torchrun --nproc-per-node 8 examples/train_llama.py      (make hf installs transformers)
"""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import usp
from usp.integrations.transformers import parallelize

SEQ, STEPS = 250, 10
mesh = usp.init_mesh(data=2, ring=2, ulysses=2)  # two replicas, each over four ranks

torch.manual_seed(0)  # the same weights on every rank
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))
parallelize(model, mesh, tile_mlp=128, tile_loss=128)
model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": usp.nn.keep_attention})
everyone = init_device_mesh(mesh.device_type, (8,))  # gradients are averaged over replicas and sequences alike
for layer in model.model.layers:
    fully_shard(layer, mesh=everyone)
fully_shard(model, mesh=everyone)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = torch.tensor(list((Path(__file__).parent.parent / "experiments/texts/gpl-3.0.txt").read_bytes()))
samples = [{"input_ids": part, "labels": part} for part in text.split(SEQ)[:-1]]
loader = DataLoader(samples, batch_size=2, sampler=usp.sampler(samples, mesh))
for step, batch in zip(range(STEPS), usp.ShardedLoader(loader, mesh, "zigzag"), strict=False):
    loss = model(**batch).loss  # the mean over all tokens of all ranks
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print(f"loss below 4: {loss.item() < 4}")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
