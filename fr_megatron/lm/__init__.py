"""Megatron-LM's own training loop (``megatron.training``), switched on by ``--flash-recovery``.

The loop stays Megatron's: nothing is copied, functions that it calls by name are replaced in its module. Each part of
it that communicates becomes one call of the core (:mod:`flashrecovery.worker.framework_calls`):

==================  ===============================================================================================
``train``           ``train_step``: forward, backward, optimizer, scheduler, and the reductions of what it returns; and
                    the norm of the parameters, for which the loop asks after it (``--log-params-norm``)
``log``             ``training_log``, in iterations in which it communicates
``evaluate``        ``evaluate_and_print_results``
``check``, ``exit``  ``post_training_step_callbacks``, ``checkpoint_and_decide_exit``, where they have something to do
``save``            ``save_checkpoint_and_time``
``gather``          ``disable_forward_pre_hook``, which gathers all parameters
``barrier``         timers that start with a barrier, and ``print_datetime``
==================  ===============================================================================================

:mod:`.hooks` is the table of what is replaced, :mod:`.arguments` the flags, :mod:`.calls` the calls, :mod:`.state` what
the loop itself keeps, :mod:`.data` the loaders, :mod:`.loading` and :mod:`.saving` what becomes of its own checkpoints.
:mod:`.elastic_loop`, :mod:`.elastic_data` and :mod:`.layer_losses` are for jobs that change their size or their layout,
:mod:`.replan` for the latter.
"""
