"""A weight-transfer backend for tests: the payload is the path of a safetensors file.

vLLM's own backends need GPUs. The lifecycle is theirs: start, any number of updates, finish.
Importing the module registers it; ``--worker-extension-cls tests.vllm.transfer.Registered`` imports
it inside every worker.
"""

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.vllm.cpu_router import supply_topk_softmax

BACKEND = "test_file"


class Registered:
    """Worker extension without methods."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors file. names: which of its tensors, in this order; empty means all."""

    path: str = ""
    names: tuple[str, ...] = ()


class FileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads checkpoint-format tensors through the model, as the NCCL and IPC engines do."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info):
        """Nothing to connect."""

    def start_weight_update(self):
        """As vLLM's engines start."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        """One chunk."""
        with safe_open(update_info.path, "pt") as file:
            names = update_info.names or file.keys()
            self.model.load_weights((name, file.get_tensor(name)) for name in names)

    def update_weights(self, update_info):
        """The base class would synchronize an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self):
        """As vLLM's engines finish."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        """Nothing to close."""

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        """The trainer writes a file."""
        raise NotImplementedError


supply_topk_softmax()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
