"""What of Ray Train is used that it does not promise to keep."""

from __future__ import annotations

from flashrecovery.capabilities import Framework, capability
from flashrecovery.capabilities.probes import Defined

_FUNCTIONS = "ray.train.v2._internal.execution.train_fn_utils"

TRAIN = capability(
    "Ray Train's functions",
    "the loop finds in a rank's process what it finds in an actor",
    Defined(
        _FUNCTIONS,
        (
            *("set_train_fn_utils", "LocalTrainFnUtils"),
            *(f"TrainFnUtils.{name}" for name in ("report", "get_checkpoint", "get_dataset_shard", "is_distributed")),
        ),
    ),
    Defined("ray.train.v2._internal.execution.context", ("get_train_context",)),
    Defined("ray.air._internal.device_manager", ("_torch_device_manager", "get_torch_device_manager_by_device_type")),
)
RAY = Framework("Ray", "ray", "ray", ("2.60.0",), (TRAIN,))
