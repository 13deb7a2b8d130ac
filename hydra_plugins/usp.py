"""launcher=slurm for Hydra, which looks for launchers here and nowhere else. What it does is experiments/slurm.py."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig, OmegaConf


@dataclass
class Settings(SlurmQueueConf):
    """submitit's settings of a job, with what differs here."""

    _target_: str = "hydra_plugins.usp.SlurmLauncher"
    name: str = "${name}"
    tasks_per_node: int | None = None  # ranks of a full node; if not given gpus_per_node, else 4
    nodes: int | None = None  # follows from each mesh: not to be given
    signal_delay_s: int | None = None  # nobody listens to the signal: not to be given


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=Settings)


class SlurmLauncher(Launcher):
    """What Hydra calls with the points of a sweep."""

    def __init__(self, **settings: Any) -> None:
        own = {key: OmegaConf.to_container(x) if OmegaConf.is_config(x) else x for key, x in settings.items()}
        self.settings: dict[str, Any] = own

    def setup(self, *, hydra_context, task_function, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx: int) -> list[JobReturn]:
        from experiments import slurm
        from experiments.config import plain

        configs = []
        for overrides in job_overrides:
            cfg = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            kept = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
            configs.append(plain(kept))
        slurm.sweep(self.task.args[0], configs, self.task.keywords["command"], self.settings)  # of points.main
        return [JobReturn(_return_value=None, status=JobStatus.COMPLETED) for _ in configs]
