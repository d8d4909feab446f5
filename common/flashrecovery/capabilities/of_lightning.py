"""What of Lightning Fabric is used that it does not promise to keep."""

from __future__ import annotations

from flashrecovery.capabilities import Framework, capability
from flashrecovery.capabilities.probes import Attributes, Defined

_WRAPPERS = "lightning.fabric.wrappers"

WRAPPERS = capability(
    "Fabric's wrappers",
    "what is inside of them is protected, and read",
    Attributes(_WRAPPERS, "_FabricModule", ("_forward_module", "_strategy")),
    Attributes(_WRAPPERS, "_FabricOptimizer", ("optimizer",)),
    Attributes(_WRAPPERS, "_FabricDataLoader", ("_dataloader", "_device")),
    Defined("lightning.fabric.utilities", ("move_data_to_device",)),
)
FABRIC = Framework("Lightning Fabric", "lightning", "lightning", ("2.6.6",), (WRAPPERS,))
