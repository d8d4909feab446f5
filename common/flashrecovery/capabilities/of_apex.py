"""What NVIDIA's apex has in its optimizers. PyPI's ``apex`` is another project, and has none."""

from __future__ import annotations

from flashrecovery.capabilities import Framework, capability
from flashrecovery.capabilities.probes import Attributes, Parameters

_ADAM, _LAMB = "apex.optimizers.fused_adam", "apex.optimizers.fused_lamb"

OPTIMIZERS = capability(
    "FusedAdam and FusedLAMB",
    "what they keep in attributes and groups (weights in fp32, counters) is kept and brought back",
    Parameters(_ADAM, "FusedAdam.step", ("closure",)),
    Attributes(_ADAM, "FusedAdam", ("param_groups_master", "master_weights", "capturable")),
    Parameters(_LAMB, "FusedLAMB.step", ("closure",)),
    otherwise="this is not NVIDIA's apex, which is installed from its source: PyPI's apex is another project",
)
APEX = Framework("apex", "apex", "apex", ("0.1",), (OPTIMIZERS,))
