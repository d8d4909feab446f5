"""What of transformers' Trainer and of accelerate is used that they do not promise to keep."""

from __future__ import annotations

from flashrecovery.capabilities import Capability, Framework, Way, capability
from flashrecovery.capabilities.probes import Attributes, Defined, Parameters, Uses

_TRAINER = "transformers.trainer"

_PARTS = (
    Parameters(_TRAINER, "Trainer.get_batch_samples", ("epoch_iterator", "num_batches", "device")),
    Parameters(_TRAINER, "Trainer.training_step", ("model", "inputs", "num_items_in_batch")),
    Defined(_TRAINER, ("Trainer._maybe_log_save_evaluate", "Trainer.store_flos", "Trainer.floating_point_ops")),
    Defined(_TRAINER, ("Trainer._load_best_model",)),
    Attributes(_TRAINER, "Trainer", ("_globalstep_last_logged", "_total_loss_scalar")),
)
LOOP = Capability(
    "the Trainer's loop",
    "each part of it that communicates becomes one call, and what it sums up goes on in a replacement",
    (
        Way(
            "kept",
            (
                *_PARTS,
                Attributes(_TRAINER, "Trainer", ("_tr_loss", "current_gradient_accumulation_steps")),
            ),
        ),
        Way(
            "local",
            (
                *_PARTS,
                Parameters(_TRAINER, "Trainer._maybe_log_save_evaluate", ("tr_loss", "grad_norm")),
            ),
        ),
    ),
)
STEP_END = Capability(
    "the end of the Trainer's step",
    "clipping, the norm for the log and the learning rate",
    (
        Way(
            "methods",
            (Defined(_TRAINER, ("Trainer._clip_grad_norm", "Trainer._get_grad_norm", "Trainer._get_learning_rate")),),
        ),
        Way(
            "inline",
            (
                Uses(_TRAINER, "Trainer._inner_training_loop", ("clip_grad_norm_", "_get_learning_rate")),
                Defined(_TRAINER, ("Trainer._get_learning_rate",)),
            ),
        ),
    ),
)
RESUMING = capability(
    "the Trainer's resuming",
    "a job that begins with resume_from_checkpoint",
    Uses(_TRAINER, "Trainer._run_epoch", ("skip_first_batches", "_load_rng_state")),
    Uses(_TRAINER, "Trainer._finalize_training", ("_initial_global_step",)),
    Defined(_TRAINER, ("Trainer._load_from_checkpoint", "Trainer._load_optimizer_and_scheduler")),
    Defined(_TRAINER, ("Trainer._load_scaler",)),
    otherwise="resume_from_checkpoint is refused",
)
TRANSFORMERS = Framework(
    "transformers", "transformers", "transformers", ("5.24.0", "5.23.0", "4.57.6"), (LOOP, STEP_END, RESUMING)
)

STATE = capability(
    "accelerate's state",
    "where an accumulation is, and which steps were skipped",
    Attributes(
        "accelerate.accelerator",
        "Accelerator",
        ("_dataloaders", "_optimizers", "_schedulers", "step", "scaler", "flag_tensor"),
    ),
    Attributes("accelerate.optimizer", "AcceleratedOptimizer", ("_is_overflow",)),
    Defined(
        "accelerate.state",
        tuple(f"GradientState.{name}" for name in ("_set_sync_gradients", "_add_dataloader", "_remove_dataloader")),
    ),
    Attributes("accelerate.state", "GradientState", ("sync_gradients", "dataloader_references")),
)
LOADERS = capability(
    "accelerate's loaders",
    "batches are counted below them",
    Attributes("accelerate.data_loader", "DataLoaderShard", ("_non_blocking", "device", "iteration")),
    Defined("accelerate.data_loader", ("send_to_device",)),
)
LAUNCH = capability(
    "accelerate's launcher",
    "it is asked what `accelerate launch` would do",
    Defined("accelerate.commands.launch", ("launch_command_parser", "_validate_launch_command")),
    Defined(
        "accelerate.utils.launch",
        ("prepare_simple_launcher_cmd_env", "prepare_multi_gpu_env", "prepare_deepspeed_cmd_env"),
    ),
)
ACCELERATE = Framework("accelerate", "accelerate", "accelerate", ("1.15.0",), (STATE, LOADERS, LAUNCH))
