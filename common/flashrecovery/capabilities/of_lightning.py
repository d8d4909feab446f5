"""What of Lightning is used that it does not promise to keep."""

from __future__ import annotations

from flashrecovery.capabilities import Framework, capability
from flashrecovery.capabilities.probes import Assigned, Attributes, Defined

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

_LOOPS = "lightning.pytorch.loops"
_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"
LOOPS = capability(
    "the loops of Lightning's Trainer",
    "their rounds are made in protected calls",
    Defined(
        f"{_LOOPS}.training_epoch_loop",
        (
            *("_TrainingEpochLoop.on_advance_end", "_TrainingEpochLoop._should_check_val_fx"),
            "_TrainingEpochLoop._build_kwargs",
            *("_TrainingEpochLoop._should_accumulate", "_TrainingEpochLoop._num_ready_batches_reached"),
        ),
    ),
    Attributes(f"{_LOOPS}.training_epoch_loop", "_TrainingEpochLoop", ("_batches_that_stepped", "_skip_next_val")),
    Attributes(f"{_LOOPS}.fit_loop", "_FitLoop", ("_combined_loader", "_data_fetcher", "max_batches")),
    Defined(f"{_LOOPS}.optimization.automatic", ("_AutomaticOptimization._make_closure",)),
    Attributes(f"{_LOOPS}.optimization.automatic", "Closure", ("_step_fn", "_backward_fn")),
    Defined(f"{_LOOPS}.progress", ("_BaseProgress",)),
    Defined("lightning.pytorch.plugins.precision.precision", ("Precision._wrap_closure",)),
    Defined(
        "lightning.pytorch.trainer.call",
        ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"),
    ),
    Defined(f"{_LOOPS}.fetchers", ("_DataLoaderIterDataFetcher",)),
    Attributes(f"{_LOOPS}.loop", "_Loop", ("_restarting",)),
    Attributes("lightning.pytorch.trainer.trainer", "Trainer", ("_logger_connector", "_signal_connector")),
    Assigned("lightning.pytorch.trainer.setup", ("_val_check_time_interval",)),
    Attributes("lightning.pytorch.strategies.ddp", "DDPStrategy", ("_ddp_comm_state",)),
    Attributes("lightning.pytorch.strategies.model_parallel", "ModelParallelStrategy", ("_tensor_parallel_size",)),
    Attributes("lightning.pytorch.core.optimizer", "LightningOptimizer", ("_optimizer",)),
    Defined("lightning.pytorch.core.module", ("LightningModule._on_before_batch_transfer",)),
)
METRICS = capability(
    "what a LightningModule has logged",
    "it goes on in a replacement",
    Defined(_RESULT, ("_Metadata", "_ResultMetric", "_Sync")),
    Attributes(_RESULT, "_ResultMetric", ("has_reset", "meta", "_forward_cache")),
    Attributes("torchmetrics.metric", "Metric", ("_defaults", "_update_count", "_computed", "_forward_cache")),
    Defined(
        "lightning.fabric.loggers.csv_logs",
        ("_ExperimentWriter._check_log_dir_exists", "CSVLogger._get_next_version"),
    ),
    Defined("lightning.fabric.loggers.tensorboard", ("TensorBoardLogger._get_next_version",)),
)
CHECKPOINTS = capability(
    "Lightning's ModelCheckpoint",
    "a checkpoint that is written again keeps its name",
    Defined(
        "lightning.pytorch.callbacks.model_checkpoint",
        (
            *("ModelCheckpoint.file_exists", "ModelCheckpoint._save_checkpoint", "ModelCheckpoint._link_checkpoint"),
            "ModelCheckpoint._remove_checkpoint",
        ),
    ),
    Attributes(
        "lightning.pytorch.callbacks.model_checkpoint",
        "ModelCheckpoint",
        ("_every_n_train_steps", "_train_time_interval", "_fs", "dirpath"),
    ),
)
TRAINER = Framework("Lightning's Trainer", "lightning", "lightning", ("2.6.6",), (LOOPS, METRICS, CHECKPOINTS))
