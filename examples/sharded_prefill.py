"""A prompt through a model whose weights no rank holds whole: FSDP2 gathers a layer at a time, usp shards the sequence.

torchrun --nproc-per-node 4 examples/sharded_prefill.py      (make hf installs transformers)

Each rank computes its quarter of the prompt and keeps its part of the cache; the next tokens come one by one.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import usp
from usp.integrations.transformers import parallelize

mesh = usp.init_mesh(ring=2, ulysses=2)
torch.manual_seed(0)  # the same weights on every rank, before they are sharded
sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=6, eos_token_id=None, **sizes)).eval()
whole = sum(x.numel() for x in model.parameters())
parallelize(model, mesh)
everyone = init_device_mesh(mesh.device_type, (4,))
for layer in model.model.layers:
    fully_shard(layer, mesh=everyone)
fully_shard(model, mesh=everyone)
kept = sum(x.to_local().numel() for x in model.parameters())

prompt = torch.randint(1000, (1, 2000))  # the same on every rank
with torch.no_grad():
    out = model.generate(prompt, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
cache = out.past_key_values if "past_key_values" in out else out.cache
counts = cache.layers[0].kept.counts[0]  # tokens by ring rank
text = f"weights {kept / whole:.2f} of {whole}, tokens {counts}, {out.sequences.shape[1] - 2000} more"
print(text)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
