"""What a mesh will cost before it is run: FLOPs, bytes, memory, time, and which mesh to take. Without torch."""

from usp.cost.counts import decode_traffic, flops, prefill_traffic, step_flops, traffic
from usp.cost.hardware import Cluster, Constant, Hardware, cluster, hardware, known_hardware, read_hardware
from usp.cost.memory import Memory, largest_batch, memory
from usp.cost.planner import Candidate, Choice, Ranking, plan, plan_attention
from usp.cost.simulation import Timeline, simulate
from usp.cost.timing import Prediction, predict, predict_model, predict_turn
from usp.cost.workload import Model, Plan, Workload, model, models

__all__ = [
    "Candidate",
    "Choice",
    "Cluster",
    "Constant",
    "Hardware",
    "Memory",
    "Model",
    "Plan",
    "Prediction",
    "Ranking",
    "Timeline",
    "Workload",
    "cluster",
    "decode_traffic",
    "flops",
    "hardware",
    "known_hardware",
    "largest_batch",
    "memory",
    "model",
    "models",
    "plan",
    "plan_attention",
    "predict",
    "predict_model",
    "predict_turn",
    "prefill_traffic",
    "read_hardware",
    "simulate",
    "step_flops",
    "traffic",
]
