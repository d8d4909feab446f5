"""Take each mend for NCCL out again, one at a time, and say which of them no test notices.

    scripts/mutate_nccl.py [NAME...]    names of mutants, or parts of them, e.g. "04-" (default: all)

A reading of NCCL's and torch's sources, and of public reports, has found 29 things that GPUs would break
(docs/testing.md has the table). What mends each of them is taken out here, in a copy of the tree, and the tests that
are named must fail. They need no GPU: what has to do with NCCL itself runs with the fake of it. ``unchanged`` runs all
of them without a mutant. C++ is compiled into a separate cache; a mutant of it takes about a minute. Ends with exit
status 1 if a mutant has survived.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mutants import SURVIVED, Mutant, Trial, arguments, chosen, run

CORE = "common/flashrecovery"
NATIVE, WORK = f"{CORE}/groups/native/backend_base.h", f"{CORE}/groups/native/work.h"
EXCHANGE, INNER, TORCH, REGISTRY, REFUSALS = (
    f"{CORE}/groups/{name}.py" for name in ("exchange", "inner", "torch_private", "registry", "refusals")
)
DEVICE, STEP, LOOP, CONTROL, RECOVER, ERRORS, COPIES, LEFT, AHEAD, BOOT, WARM = (
    f"{CORE}/worker/{name}.py"
    for name in (
        "control/device_sync",
        "step/transaction",
        "loop",
        "control/control_thread",
        "recovery_commands",
        "control/nccl_error_watch",
        "replication/own_copies",
        "step/activation_release",
        "preimport/preimport",
        "startup/bootstrap",
        "startup/warm_up",
    )
)
FENCE, PROCESSES, STANDBY = (
    f"{CORE}/agent/processes/{name}.py" for name in ("gpu_fence", "process_manager", "standby")
)
ENV, ENVIRONMENT, CHECKS = (f"{CORE}/{name}.py" for name in ("runtime/nccl_env", "runtime/environment", "cli/checks"))
FLAT, COPIES_EXCHANGE = (f"{CORE}/redundancy/memory/{name}.py" for name in ("flat_buffer", "peer_exchange"))
PACE, BUFFERS, ADAPTER = f"{CORE}/groups/native/pace.h", f"{CORE}/adapter/buffers.py", f"{CORE}/adapter/base.py"
FSDP2_STATE, FSDP2_ADAPTER = f"{CORE}/adapter/fsdp2_state.py", f"{CORE}/torch_native/fsdp2.py"
ACCELERATOR, MACHINE = f"{CORE}/groups/accelerator.py", f"{CORE}/controller/machine.py"
PLACEMENT, DOMAINS = (f"{CORE}/plan/membership/{name}.py" for name in ("placement", "failure_domains"))
SXID, NVSWITCH = f"{CORE}/health/sxid.py", f"{CORE}/health/nvswitch.py"
REDUCER, ORDER = f"{CORE}/torch_native/ddp_reducer.py", f"{CORE}/controller/recovery.py"
MEGATRON = "fr_megatron/support.py"
QUIET_PLAN, QUIET_WORKER, QUIET_AGENT, ABANDON = (
    f"{CORE}/{name}.py"
    for name in ("plan/quiet_abort", "worker/control/quiet_abort", "agent/processes/quiet_fence", "groups/exchange")
)

HELD, PROBE, BARRIER_PLAN = (
    f"{CORE}/{name}.py" for name in ("worker/step/device_barrier", "worker/step/flag_probe", "plan/device_barrier")
)
HOLD = f"{CORE}/groups/native/stream_hold.h"

TRANSFER, LANES = f"{CORE}/worker/transfer/transfer.py", f"{CORE}/worker/transfer/device_lanes.py"
DIGEST = f"{CORE}/state/digest.py"
DEVICE_PACE, DDP_ADAPTER = f"{CORE}/groups/native/device_pace.h", f"{CORE}/torch_native/ddp.py"
GATE, SLOW_DEVICES = f"{CORE}/worker/control/gate.py", "tests/conformance/test_slow_devices.py"

FAKE = "tests/integration/groups/test_nccl.py"
HELD_BACK = "tests/integration/worker/test_device_barrier.py"
FAKE_JOBS, DEVICE_TRANSFER = "tests/conformance/test_nccl.py", "tests/integration/worker/test_device_transfer.py"


def _unit(name: str, *tests: str) -> tuple[str, ...]:
    """All tests of a file, or only those."""
    file = f"tests/unit/test_{name}.py"
    return tuple(f"{file}::{test}" for test in tests) or (file,)


@dataclass(frozen=True)
class Row:
    """One of the 29. ``without``: what of it no mutant takes out, and why."""

    number: int
    what: str
    mutants: tuple[tuple[Mutant, tuple[str, ...]], ...] = ()
    without: str = ""


def _out(name: str, file: str, old: str, new: str, *tests: str) -> tuple[Mutant, tuple[str, ...]]:
    """A mutant, and the tests of which one must fail."""
    return Mutant(name, file, old, new), tests


ROWS = (
    Row(
        1,
        "an operation without a Work is recorded for a replacement",
        (
            _out(
                "01-null-work-is-not-recorded",
                NATIVE,
                "      if (!launchedLater) record->succeed();\n",
                "",
                f"{FAKE}::test_a_replacement_gets_what_synchronous_set_up_collectives_gave",
            ),
            _out(
                "01-not-at-a-sections-end",
                NATIVE,
                "        for (const auto& part : launched) part->succeed();\n",
                "",
                f"{FAKE}::test_a_replacement_gets_what_synchronous_set_up_collectives_gave",
            ),
            _out(
                "01-before-a-sections-end",
                NATIVE,
                "if (!launchedLater) record->succeed();",
                "record->succeed();",
                f"{FAKE}::test_a_replacement_gets_what_synchronous_set_up_collectives_gave",
            ),
        ),
    ),
    Row(
        2,
        "a section that a failure leaves is ended, before the abort",
        (
            _out(
                "02-section-stays-open",
                NATIVE,
                "        section_.end();\n        throw;",
                "        throw;",
                f"{FAKE}::test_a_failure_within_a_section_ends_it",
            ),
            _out(
                "02-another-threads-is-not-reported",
                EXCHANGE,
                "for name, outer in named if module.close_section(outer))",
                "for name, outer in named if module.close_section(outer) and False)",
                f"{FAKE}::test_a_section_that_another_thread_leaves_open_is_reported",
            ),
            _out(
                "02-abort-within-a-section",
                NATIVE,
                "if (!section_.awaitClosed(kSectionWait) || !inside_",
                "if (!inside_",
                f"{FAKE}::test_an_abort_waits_for_the_end_of_a_section",
            ),
        ),
    ),
    Row(
        3,
        "the tag follows the device",
        (
            _out(
                "03-commit-does-not-wait",
                STEP,
                "                gate.overhead.aside(self._worker.device.before_commit)\n",
                "                pass\n",
                *_unit("step_on_device"),
            ),
            _out(
                "03-waits-for-one-stream-only",
                DEVICE,
                "                accelerator().synchronize()\n",
                "                accelerator().synchronize_stream()\n",
                f"{FAKE}::test_a_commit_waits_for_what_the_device_has_not_done",
            ),
            _out(
                "03-mutation-does-not-wait",
                STEP,
                "        self._gate.overhead.aside(self._worker.device.before_mutation)\n",
                "",
                *_unit("step_on_device"),
            ),
            _out(
                "03-aborted-is-not-torn",
                STEP,
                "if not self._collectives.raised and not cut_short:",
                "if not self._collectives.raised:",
                *_unit("step_on_device"),
            ),
        ),
    ),
    Row(
        4,
        "communicators are made in attach, on the process's device",
        (
            _out(
                "04-only-where-the-script-named-a-device",
                INNER,
                "timeout, request.device_id or device_in_use)",
                "timeout, request.device_id)",
                f"{FAKE}::test_attach_connects_groups_that_nobody_has_used_yet",
            ),
            _out(
                "04-attach-knows-no-device",
                EXCHANGE,
                "device = accelerator().current()",
                "device = None",
                f"{FAKE}::test_attach_connects_groups_that_nobody_has_used_yet",
            ),
            _out(
                "04-the-backend-is-not-connected",
                TORCH,
                "            backend.eager_connect_single_device(device)\n",
                "            pass\n",
                *_unit("nccl_backend"),
            ),
            _out(
                "04-on-the-threads-own-device",
                TORCH,
                "        with torch.cuda.device(device):  # this may be a helper thread\n",
                "        if True:\n",
                *_unit("nccl_backend"),
            ),
        ),
        without="how long NCCL needs for it on GPUs",
    ),
    Row(
        5,
        "torch's watchdog does not sleep",
        (
            _out("05-default-of-the-watchdog", ENV, '    _DUMP_WAIT: "1",\n', "", *_unit("nccl_env")),
            _out(
                "05-doctor-does-not-look",
                ENV,
                "if waits is None or not waits.isdigit() or int(waits) > _MAX_DUMP_WAIT_MS:",
                "if False:",
                *_unit("nccl_env"),
            ),
            _out(
                "05-launcher-does-not-set-it",
                ENVIRONMENT,
                "    env |= {name: os.environ.get(name, value) for name, value in LAUNCH_DEFAULTS.items()}\n",
                "",
                *_unit("nccl_env"),
            ),
        ),
    ),
    Row(
        6,
        "an abort waits for threads within a launch, and not for ever",
        (
            _out(
                "06-abort-during-a-launch",
                NATIVE,
                "if (!section_.awaitClosed(kSectionWait) || !inside_.awaitEmpty(kLaunchWait)) return;",
                "if (!section_.awaitClosed(kSectionWait)) return;",
                f"{FAKE}::test_an_abort_waits_for_who_is_launching",
            ),
            _out(
                "06-launch-is-not-counted",
                NATIVE,
                "    std::optional<Inside> here(std::in_place, inside_);  // before",
                "    std::optional<Inside> here;  // before",
                f"{FAKE}::test_an_abort_waits_for_who_is_launching",
            ),
            _out(
                "06-what-hangs-is-aborted-all-the-same",
                NATIVE,
                "|| !inside_.awaitEmpty(kLaunchWait)) return;",
                "|| (inside_.awaitEmpty(kLaunchWait), false)) return;",
                f"{FAKE}::test_a_communicator_that_hangs_in_its_creation_is_not_aborted_under_its_creator",
            ),
            _out(
                "06-what-hangs-is-not-reported",
                EXCHANGE,
                "        if not (operations or buffers or stuck or sections):",
                "        if not (operations or buffers or sections):",
                f"{FAKE}::test_a_communicator_that_hangs_in_its_creation_is_not_aborted_under_its_creator",
            ),
        ),
    ),
    Row(
        7,
        "a rank is filled again when its GPU's memory is free",
        (
            _out(
                "07-its-children-do-not-count",
                FENCE,
                "        if session_members(process.pid):\n            return True\n",
                "",
                *_unit("gpu_fence"),
            ),
            _out(
                "07-nvml-is-not-asked",
                FENCE,
                "return self._listed is not None and process",
                "return False and process",
                *_unit("gpu_fence"),
            ),
            _out(
                "07-the-fence-is-not-awaited",
                PROCESSES,
                "        while not await self._gpu_fence.released(gone, self._config.timeouts.fence_s):",
                "        while False:",
                *_unit("gpu_fence"),
            ),
            _out(
                "07-of-its-own-rank-only",
                PROCESSES,
                "        for other in others:",
                "        for other in []:",
                *_unit("gpu_fence"),
            ),
        ),
    ),
    Row(
        8,
        "CUDA graphs with collectives are refused",
        (
            _out(
                "08-graph-is-not-refused", REFUSALS, "        if captured:\n", "        if False:\n", *_unit("refusals")
            ),
            _out(
                "08-graphs-are-not-watched",
                REFUSALS,
                "    kind.capture_begin, kind.capture_end = capture_begin, capture_end\n",
                "",
                *_unit("refusals"),
            ),
            _out(
                "08-megatrons-settings",
                MEGATRON,
                '    if implementation not in (None, "none"):',
                "    if False:",
                *_unit("megatron_support"),
            ),
        ),
        without="that generators are set in place: without graphs no reference to one is kept",
    ),
    Row(
        9,
        "what communicates past the groups, or keeps a history, is refused by name",
        (
            _out(
                "09-symmetric-memory",
                REFUSALS,
                "        setattr(kind, name, staticmethod(refused))\n",
                "        pass\n",
                *_unit("refusals"),
            ),
            _out("09-deepep", REFUSALS, "    kind.__init__ = _never(", "    _never(", *_unit("refusals")),
            _out(
                "09-userbuffers",
                REFUSALS,
                "    module.initialize_ub = _never(",
                "    _never(",
                *_unit("refusals"),
            ),
            _out(
                "09-delayed-scaling",
                REFUSALS,
                "    manager.add_fp8_tensors_to_global_buffer = staticmethod(checked)\n",
                "",
                *_unit("refusals"),
            ),
            _out(
                "09-megatrons-fp8",
                MEGATRON,
                'in ("delayed", "custom"):',
                'in ("custom",):',
                *_unit("megatron_support"),
            ),
            _out(
                "09-megatrons-deepep",
                MEGATRON,
                'if getattr(config, "moe_enable_deepep", False) or',
                "if",
                *_unit("megatron_support"),
            ),
            _out(
                "09-megatrons-userbuffers",
                MEGATRON,
                '    if getattr(config, "tp_comm_overlap", False):',
                "    if False:",
                *_unit("megatron_support"),
            ),
        ),
    ),
    Row(
        10,
        "who may finish is waited for, then all abort; what waits for a dead peer is not",
        (
            _out(
                "10-all-stop-at-once",
                ORDER,
                "        chosen = behind or held\n",
                "        chosen = held\n",
                *_unit("machine", "test_ranks_that_are_behind_finish_first"),
            ),
            _out(
                "10-finisher-is-not-waited-for",
                CONTROL,
                "            self._let_finish(command.stop.mutation_grace_s)\n",
                "            pass\n",
                *_unit("let_finish"),
            ),
            _out(
                "10-host-tells-of-the-device",
                CONTROL,
                "            if self._device.runs_behind:\n",
                "            if False:\n",
                *_unit("let_finish"),
            ),
            _out(
                "10-a-wait-for-the-device-does-not-count",
                CONTROL,
                "if self._device.blocked_s > longest_s or now - moved > longest_s:",
                "if now - moved > longest_s:",
                *_unit("let_finish"),
            ),
        ),
        without="whether a kernel on another GPU touches buffers that a peer has freed (nccl#863) needs several GPUs",
    ),
    Row(
        11,
        "neighbour copies: shared and page-locked, waited for late, over several streams",
        (
            _out(
                "11-pinned-is-not-shared",
                FLAT,
                "            if outlives or ((share or pin) and layout.nbytes > 0):",
                "            if outlives or (share and not pin and layout.nbytes > 0):",
                *_unit("shared_memory"),
            ),
            _out(
                "11-shared-is-not-pinned",
                FLAT,
                "                    page_lock(self.shared, self.buffer)\n",
                "                    pass\n",
                *_unit("shared_memory"),
            ),
            _out(
                "11-waits-after-the-first-forward",
                STEP,
                "        self._hook_fired = True\n",
                "        self._hook_fired = True\n        self.synchronising()\n",
                *_unit("copies_in_time"),
            ),
            _out(
                "11-every-micro-batch-counts-as-the-last",
                ADAPTER,
                "        if self._synchronises():\n",
                "        if True:\n",
                *_unit("torch_native", "test_of_several_micro_batches_only_the_last_one_synchronises"),
            ),
            _out(
                "11-fsdp2-waits-after-the-forward",
                FSDP2_ADAPTER,
                "        return False  # said later than at the end of the forward pass, by the last unit\n",
                "        return fsdp2_state.synchronises(self.fsdp)\n",
                *_unit("torch_native", "test_with_fsdp2_copies_are_waited_for_before_the_last_unit_reduces"),
            ),
            _out(
                "11-a-unit-that-hands-over-nothing-counts",
                FSDP2_STATE,
                " and synchronises(self._root) and _hands_over(group):\n",
                " and synchronises(self._root):\n",
                *_unit("torch_native", "test_a_unit_without_gradients_is_no_sign_that_a_contribution_follows"),
            ),
            _out("11-one-stream", COPIES_EXCHANGE, "STREAMS = 4\n", "STREAMS = 1\n", *_unit("pacing")),
            _out(
                "11-copies-are-not-held-back",
                PACE,
                "    if (hurries() || !Traffic::instance().underWay()) return;\n",
                "    return;\n",
                "tests/integration/redundancy/test_pacing.py::test_a_copy_waits_for_the_end_of_a_collective",
            ),
        ),
    ),
    Row(
        12,
        "an own pre-step copy is begun at the hand-out",
        (
            _out(
                "12-copied-before-the-mutation",
                COPIES,
                "            self.undo.start(version)\n",
                "            pass\n",
                *_unit("own_copies"),
            ),
        ),
        without="a loss that is reduced after the optimizer still makes every rank keep such a copy (docs/megatron.md)",
    ),
    Row(
        13,
        "buffers on a device are compared there, the host waits once",
        (
            _out(
                "13-a-wait-for-each-buffer",
                BUFFERS,
                "torch.stack([(one == other).all() for one, other in pairs]).tolist())",
                "[torch.equal(one, other) for one, other in pairs])",
                *_unit("silent_buffers"),
            ),
            _out(
                "13-a-call-for-each-buffer",
                BUFFERS,
                "    equal = all_equal([item.to_compare(live) for item, live, _ in unmoved])\n",
                "    equal = [all_equal([item.to_compare(live)])[0] for item, live, _ in unmoved]\n",
                *_unit("silent_buffers"),
            ),
        ),
    ),
    Row(
        14,
        "what a step that was cut short has taken is free before it is done again",
        (
            _out(
                "14-layout-takes-all-gradients",
                REDUCER,
                '            return torch.empty_like(args[0], device="meta")\n',
                "            return torch.zeros_like(args[0])\n",
                *_unit("torch_native", "test_a_reducer_is_renewed_without_a_second_set_of_gradients"),
            ),
            _out(
                "14-two-reducers-at-once",
                REDUCER,
                "    ddp.reducer = ddp.logger = None  # type: ignore[assignment]\n",
                "",
                *_unit("torch_native", "test_the_old_reducers_buckets_are_free_before_the_new_ones_are_made"),
            ),
            _out(
                "14-gradients-keep-the-old-buckets",
                REDUCER,
                "        _drop_gradients(reducer_parameters(ddp))  # they may be views",
                "        pass  # they may be views",
                *_unit("torch_native", "test_a_reducer_is_renewed_without_a_second_set_of_gradients"),
            ),
            _out(
                "14-frames-keep-activations",
                LEFT,
                "        frame.clear()\n",
                "        return True\n",
                *_unit("leftovers"),
            ),
            _out(
                "14-graphs-keep-activations",
                LEFT,
                "    return sum(_empty(node) for node in _nodes(roots, since))\n",
                "    return 0\n",
                *_unit("leftovers"),
            ),
            _out(
                "14-nothing-is-let-go",
                RECOVER,
                "        self._loop.let_go()\n",
                "",
                *_unit("recovery_commands"),
            ),
            _out(
                "14-torchs-cache-stays",
                RECOVER,
                "        self._worker.device.make_room()\n",
                "",
                *_unit("recovery_commands"),
            ),
        ),
    ),
    Row(
        15,
        "restore over NCCL, digests on the device",
        (
            _out(
                "15-through-host-memory",
                TRANSFER,
                "        if self._device is not None and any(matched):\n",
                "        if False:\n",
                f"{DEVICE_TRANSFER}::test_several_sources_and_destinations_at_once",
            ),
            _out(
                "15-no-group-is-used",
                RECOVER,
                "                device=groups.device_group(),\n",
                "",
                f"{FAKE_JOBS}::test_a_replica_is_restored_from_device_to_device",
            ),
            _out(
                "15-each-destination-its-own-digest",
                TRANSFER,
                "            matched = [both for s in sources for both in masks[s.name]]\n",
                "            matched = [bool(both) for both in answer.tolist()]\n",
                f"{DEVICE_TRANSFER}::test_what_lies_in_host_memory_on_one_side_goes_through_it",
            ),
            _out(
                "15-bytes-are-hashed-on-the-host",
                DIGEST,
                "        if known and place in known:\n",
                "        if False:\n",
                *_unit("fingerprint", "test_shards_wait_for_the_device_once_and_read_the_rest"),
            ),
            _out(
                "15-read-before-it-has-arrived",
                LANES,
                "        self._patience.wait(over)\n        with self._reads",
                "        with self._reads",
                f"{DEVICE_TRANSFER}::test_the_host_waits_for_the_device_before_it_touches_what_arrives",
            ),
            _out(
                "15-an-abort-passes-for-an-arrival",
                LANES,
                "            pause = min(2 * pause, _LONGEST_S)\n        self.check()\n",
                "            pause = min(2 * pause, _LONGEST_S)\n",
                f"{DEVICE_TRANSFER}::test_the_torn_end_of_an_abort_is_not_taken_for_an_arrival",
            ),
            _out(
                "15-a-hung-device-is-waited-for",
                LANES,
                "            self.check()\n            time.sleep(pause)\n",
                "            time.sleep(pause)\n",
                f"{DEVICE_TRANSFER}::test_a_device_that_hangs_is_not_waited_for_once_communication_is_abandoned",
            ),
            _out(
                "15-one-pair-after-another",
                LANES,
                "            self._group.start(\n"
                "                [(m.buffer, m.lane.peer) for m in moving if m.lane.sending],\n"
                "                [(m.buffer, m.lane.peer) for m in moving if not m.lane.sending],\n"
                "            )\n",
                "            for m in sorted(moving, key=lambda m: not m.lane.sending):\n"
                "                one, sends = [(m.buffer, m.lane.peer)], m.lane.sending\n"
                "                self._group.start(one * sends, one * (not sends))\n",
                f"{DEVICE_TRANSFER}::test_everybody_sends_to_everybody",
            ),
        ),
        without="how fast it is, and that NCCL's own messages carry it, needs GPUs",
    ),
    Row(
        16,
        "drain first, then the device, for a bounded time",
        (
            _out(
                "16-the-device-before-the-drain",
                RECOVER,
                "report = groups.drain(drain_s, aborts=not beside)\n        worker.device.settle(drain_s)",
                "worker.device.settle(drain_s)\n        report = groups.drain(drain_s, aborts=not beside)",
                *_unit("recovery_commands"),
            ),
            _out(
                "16-waits-for-ever",
                DEVICE,
                "        waiter.join(deadline_s)\n",
                "        waiter.join()\n",
                "--timeout=20",
                *_unit("device"),
            ),
            _out(
                "16-a-busy-device-is-quiet",
                DEVICE,
                "        if waiter.is_alive():\n",
                "        if False:\n",
                *_unit("device"),
            ),
            _out("16-its-error-is-lost", DEVICE, "        if failures:\n", "        if False:\n", *_unit("device")),
        ),
    ),
    Row(
        17,
        "in a replacement groups of one rank come after the default group",
        (
            _out(
                "17-groups-of-one-rank-come-first",
                REGISTRY,
                '    if not STATE.detached or (request.size == 1 and request.kind != "nccl"):\n',
                "    if not STATE.detached or request.size == 1:\n",
                f"{FAKE}::test_a_replacements_groups_of_one_rank_come_after_the_default_group",
            ),
            _out(
                "17-they-never-come",
                EXCHANGE,
                "    todo = [g for g in groups() if g.size > 1 or g.detached]\n",
                "    todo = [g for g in groups() if g.size > 1]\n",
                f"{FAKE}::test_a_replacements_groups_of_one_rank_come_after_the_default_group",
            ),
            _out(
                "17-they-answer-from-the-set-up-log",
                NATIVE,
                "inner == local_ && getSize() > 1) {",
                "inner == local_) {",
                f"{FAKE}::test_a_replacements_groups_of_one_rank_answer_with_its_own_data",
            ),
        ),
        without="which GPU torch then chooses",
    ),
    Row(
        18,
        "NCCL's asynchronous errors are asked for",
        (
            _out(
                "18-nothing-is-reported",
                NATIVE,
                "if (isNccl(*inner.backend) && inner.backend->getError()",
                "if (false && inner.backend->getError()",
                f"{FAKE}::test_a_rank_that_waits_for_a_dead_peer_is_freed_by_the_abort_alone",
            ),
            _out(
                "18-nothing-comes-of-it",
                ERRORS,
                "            groups.abandon(f",
                "            str(f",
                *_unit("error_watch"),
            ),
            _out(
                "18-errors-are-not-polled",
                LOOP,
                "        NcclErrorWatch(self._gate, self._worker.settings.timeouts.peer_error_wait_s).start()\n",
                "",
                *_unit("error_watch"),
            ),
        ),
    ),
    Row(
        19,
        "an abort needs no Python",
        (
            _out(
                "19-abort-holds-the-interpreter",
                NATIVE,
                "      here->abortInners(inners);\n      bury(inners);\n",
                "      auto state = PyGILState_Ensure();\n"
                "      here->abortInners(inners);\n"
                "      PyGILState_Release(state);\n",
                f"{FAKE}::test_an_abort_waits_for_the_end_of_a_section",
            ),
            _out(
                "19-abort-blocks-its-caller",
                NATIVE,
                "    std::thread([here = self(), inners = snapshot()]() mutable {"
                "  // something else may stand here before it has begun\n"
                "      here->abortInners(inners);\n"
                "      bury(inners);\n"
                "      Ending::drop(std::move(here));\n"
                "    }).detach();\n",
                "    abortInners(snapshot());\n",
                f"{FAKE}::test_an_abort_waits_for_the_end_of_a_section",
            ),
        ),
    ),
    Row(
        20,
        "what decides the order of sums is named, and left alone",
        (
            _out(
                "20-a-variable-is-not-named",
                ENV,
                '_ORDERS_OF_SUMS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")',
                '_ORDERS_OF_SUMS = ("NCCL_ALGO", "NCCL_PROTO")',
                *_unit("nccl_env"),
            ),
            _out(
                "20-the-launcher-sets-one",
                ENV,
                '    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",\n',
                '    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",\n    "NCCL_NVLS_ENABLE": "0",\n',
                *_unit("nccl_env"),
            ),
            _out("20-doctor-is-silent", CHECKS, "    if free:\n", "    if False:\n", *_unit("doctor")),
        ),
        without="whether the sums are equal on other nodes with these variables needs GPUs",
    ),
    Row(
        21,
        "a standby uses a GPU only where it is told, and that one",
        (
            _out(
                "21-an-import-takes-gpu-0",
                AHEAD,
                "            cuda._lazy_init = refuse  # type: ignore[attr-defined]\n",
                "",
                *_unit("standby_device"),
            ),
            _out(
                "21-fills-another-gpus-rank",
                STANDBY,
                "if not process.dead and self._places[process] in (None, local_rank):",
                "if not process.dead:",
                *_unit("standby_device"),
            ),
            _out(
                "21-is-not-told-which",
                PROCESSES,
                "        at_once = {} if device is None else {STANDBY_DEVICE_ENV: str(device)}\n",
                "        at_once: dict[str, str] = {}\n",
                *_unit("standby_device"),
            ),
            _out(
                "21-makes-no-context",
                BOOT,
                "        make_context(int(device))\n",
                "        pass\n",
                *_unit("standby_device"),
            ),
            _out("21-makes-it-on-gpu-0", WARM, "    torch.cuda.set_device(device)\n", "", *_unit("standby_device")),
        ),
    ),
    Row(
        22,
        "Works of torch's newer NCCL backends",
        (
            _out(
                "22-an-ended-work-is-asked",
                WORK,
                "return *record_->replaced && !record_->abandoned && !record_->failed();",
                "return false;",
                f"{FAKE}::test_a_work_that_has_ended_may_be_asked_when_its_backend_is_gone",
            ),
            _out(
                "22-a-work-outlives-its-backend",
                NATIVE,
                'return isNccl(*inner) && inner->getBackendName() != "nccl" ? inner : BackendPtr();',
                "return BackendPtr();",
                f"{FAKE}::test_a_work_that_has_ended_may_be_asked_when_its_backend_is_gone",
            ),
        ),
    ),
    Row(
        23,
        "a survivor whose device is lost in the recovery is a victim of it",
        (
            _out(
                "23-it-is-the-scripts",
                MACHINE,
                "taken_along(m, self.job.last_failure) if self._is_taken_along(m) else m for m",
                "m for m",
                *_unit("context_lost"),
            ),
            _out(
                "23-what-replacements-meet-is-not-theirs",
                MACHINE,
                "bool(message.last_words.device) and message.rank not in recovery.victims",
                "bool(message.last_words.device)",
                *_unit("context_lost"),
            ),
            _out(
                "23-it-answers-and-stays",
                RECOVER,
                "            worker.end_if_context_is_lost(e)\n            if not",
                "            if not",
                *_unit("recovery_commands"),
            ),
            _out(
                "23-nobody-looks-after-the-answer",
                RECOVER,
                "                worker.end_if_context_is_lost(e)\n                raise",
                "                raise",
                *_unit("recovery_commands"),
            ),
            _out(
                "23-one-error-is-enough",
                ACCELERATOR,
                "    for _ in range(2):",
                "    for _ in range(1):",
                *_unit("context_lost"),
            ),
            _out(
                "23-last-words-do-not-say-so",
                BOOT,
                "        device=device,\n",
                "",
                f"{FAKE_JOBS}::test_survivors_lose_their_devices_within_the_recovery",
            ),
        ),
        without="whether a GPU's peers are lost with a process, and whether its context can be asked then, needs GPUs",
    ),
    Row(
        24,
        "a lane that never begins fails",
        (
            _out(
                "24-it-is-waited-for",
                TRANSFER,
                "                planned.add_done_callback(functools.partial(_fail_lane, e))\n",
                "                pass\n",
                f"{DEVICE_TRANSFER}::test_a_source_that_dies_before_anything_of_it_is_known",
            ),
        ),
    ),
    Row(
        25,
        "a process that lives is killed when all ranks of its node have aborted",
        (
            _out(
                "25-killed-first",
                QUIET_AGENT,
                "        if member.state is Communicators.NONE and may_kill(",
                "        if may_kill(member, [], FENCE_S) or may_kill(",
                f"{FAKE_JOBS}::test_a_living_rank_is_killed_when_all_of_its_domain_have_aborted",
            ),
            _out(
                "25-the-others-are-not-looked-at",
                QUIET_PLAN,
                "    if any(one.state is not Communicators.NONE for one in shared):\n        return False\n",
                "",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-it-itself-need-not-have-aborted",
                QUIET_PLAN,
                "    return victim.state is Communicators.NONE or victim.stopped or waited_s >= ANSWER_S\n",
                "    return True\n",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-aborts-amid-a-transfer",
                QUIET_WORKER,
                "        drained = self._drained(TRANSFER_S)\n",
                "        drained = True\n",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-aborts-when-others-still-launch",
                QUIET_PLAN,
                "not any(one.state in unquiet and not one.stopped for one in others)",
                "True",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-its-own-wait-is-enough",
                QUIET_WORKER,
                "while not drained and not page.may_abort and",
                "while False and",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-what-is-stopped-is-waited-for",
                QUIET_AGENT,
                "generation, is_stopped(process.pid)",
                "generation, False",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-the-page-does-not-say-it",
                QUIET_WORKER,
                "while aborting() and time",
                "while False and time",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-aborts-before-the-wait",
                ABANDON,
                "    if order is not None:\n        order.before_aborts()\n",
                "",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-it-changes-its-state-meanwhile",
                QUIET_AGENT,
                "            process.page.lend(lease_clock())\n",
                "",
                *_unit("quiet_abort"),
            ),
            _out(
                "25-a-wait-without-a-bound",
                QUIET_PLAN,
                "    if waited_s >= FENCE_S:\n        return True\n",
                "",
                *_unit("quiet_abort"),
            ),
        ),
        without="whether 0.1 s tells a kernel that waits from one that transfers needs GPUs",
    ),
    Row(
        26,
        "an optimizer that is launched before the gradients are whole is held back until they are, or does nothing",
        (
            _out(
                "26-the-flag-is-not-set",
                STEP,
                "            self._on_device.end(void=True)\n",
                "            self._on_device.end(void=False)\n",
                *_unit("step_on_device", "test_a_step_that_no_longer_counts_is_void_and_nothing_has_been_touched"),
            ),
            _out(
                "26-let-go-before-they-are-whole",
                STEP,
                "            self._gate.overhead.aside(lambda: self._worker.device.until(self._on_device.wait))\n",
                "",
                *_unit("step_on_device"),
            ),
            _out(
                "26-an-abort-is-not-looked-for",
                STEP,
                "            self._refuse_void()\n            self._collectives",
                "            self._collectives",
                *_unit("step_on_device"),
            ),
            _out(
                "26-the-tag-does-not-follow",
                STEP,
                "            self._collectives.mutation_begins()\n            self._gate.mutate()\n",
                "            self._collectives.mutation_begins()\n",
                *_unit("step_on_device"),
            ),
            _out(
                "26-a-void-step-counts-as-a-write",
                STEP,
                "            self._touches.begin()\n",
                "",
                *_unit("step_on_device"),
            ),
            _out(
                "26-a-comparison-is-held-back",
                STEP,
                "            communicates=told or self",
                "            communicates=self",
                *_unit("step_on_device"),
            ),
            _out(
                "26-the-scripts-flag-is-overwritten",
                HELD,
                "        if isinstance(scripts, torch.Tensor):",
                "        if False:",
                f"{HELD_BACK}::test_a_step_that_overflows_anyway_is_none",
            ),
            _out(
                "26-the-scripts-flag-is-lost",
                HELD,
                "        if held.scripts_flag is _NOT_SET:\n",
                "        if True:\n",
                f"{HELD_BACK}::test_a_step_that_overflows_anyway_is_none",
            ),
            _out(
                "26-no-probe",
                HELD,
                " or self._try_hold() or flag_probe.refusal(optimizer)",
                " or self._try_hold()",
                f"{HELD_BACK}::test_a_flag_that_is_not_honoured_is_not_trusted",
            ),
            _out(
                "26-the-stream-is-not-tried",
                HELD,
                "                if not hold.let_go(void=void) or early:\n",
                "                if not hold.let_go(void=void):\n",
                f"{HELD_BACK}::test_a_stream_that_is_not_held_is_found",
            ),
            _out(
                "26-what-was-void-is-not-done-again",
                HELD,
                "            flag_probe.plain_step(optimizer)()\n",
                "",
                f"{HELD_BACK}::test_a_host_that_waits_for_the_stream_itself_is_let_go_and_the_step_is_done_again",
            ),
            _out(
                "26-it-waits-for-ever",
                HOLD,
                "        shared.release(true);\n",
                "        shared.until += shared.patience;\n",
                f"{HELD_BACK}::test_a_hold_ends_once_and_the_number_grows",
            ),
            _out(
                "26-torn-gradients-are-not-tried",
                PROBE,
                'for factor in (1.0, float("nan")):',
                "for factor in (1.0,):",
                *_unit("device_barrier"),
            ),
            _out(
                "26-other-bits-are-not-found",
                PROBE,
                "            if not _same(guarded.content(), twin.content()):",
                "            if False:",
                *_unit("device_barrier"),
            ),
            _out(
                "26-state-that-is-made-there",
                BARRIER_PLAN,
                "    if not facts.complete:\n",
                "    if False:\n",
                *_unit("device_barrier"),
            ),
            _out(
                "26-other-hooks-run-there",
                BARRIER_PLAN,
                "    if facts.other_hooks:\n",
                "    if False:\n",
                *_unit("device_barrier"),
            ),
            _out(
                "26-a-compiled-step-is-held-back",
                BARRIER_PLAN,
                "    if facts.compiled:\n",
                "    if False:\n",
                *_unit("device_barrier"),
            ),
            _out(
                "26-a-scalers-leftovers",
                ADAPTER,
                "            restore_scaling(optimizer, scaling)\n",
                "            pass\n",
                *_unit("torch_native", "test_an_interrupted_step_leaves_nothing_of_a_grad_scaler_on_its_optimizer"),
            ),
        ),
        without="that the driver's wait and the copy of the flag come in this order on a GPU needs one",
    ),
    Row(
        27,
        "copies are kept outside of what the death of a rank may take along",
        (
            _out(
                "27-the-next-rank-keeps-them",
                PLACEMENT,
                "min(range(1, ranks_per_node), key=joined, default=1) if gpus else 1",
                "1",
                *_unit("plan_placement", "test_copies_on_one_node_go_to_gpus_that_are_not_lost_with_the_ranks_own"),
            ),
            _out(
                "27-a-ring-of-some-does-not-look",
                PLACEMENT,
                "        return sum(node for node, _ in near), sum(domain for _, domain in near), joined\n",
                "        return sum(node for node, _ in near), sum(domain for _, domain in near), 0\n",
                *_unit("plan_placement", "test_a_ring_of_some_ranks_leaves_their_gpus_where_it_can"),
            ),
            _out(
                "27-a-domain-takes-no-one-along",
                DOMAINS,
                "    if event is LossEvent.GPUS and (one.gpus < 0 or one.gpus != other.gpus):\n        return False\n",
                "    if event is LossEvent.GPUS:\n        return False\n",
                *_unit("failure_domains"),
                *_unit("plan_placement"),
            ),
            _out(
                "27-the-keeper-may-be-in-the-domain",
                PLACEMENT,
                "keeper is None or domains[keeper(h)] not in lost",
                "True",
                *_unit("plan_placement", "test_a_copy_goes_out_of_the_domain_if_any_holder_can_send_it_there"),
            ),
        ),
        without="what NVML says of such domains needs GPUs",
    ),
    Row(
        28,
        "a process that SIGKILL does not end is not waited for, and its rank goes elsewhere",
        (
            _out(
                "28-one-look-is-enough",
                PROCESSES,
                "for thread in asleep.keys() & before.keys():",
                "for thread in asleep:",
                *_unit("never_ends", "test_one_that_is_slow_to_end_has_run_between_two_looks"),
            ),
            _out(
                "28-it-is-waited-for",
                PROCESSES,
                "        if self._count < _ENDLESS:\n",
                "        if True:\n",
                *_unit("never_ends", "test_one_that_does_not_end_for_long_never_does"),
            ),
            _out(
                "28-its-rank-is-filled-here",
                PROCESSES,
                "            if self._never_ends(rank, looks.endless([old.pid])):\n                return False\n",
                "            if self._never_ends(rank, looks.endless([old.pid])):\n                return True\n",
                *_unit("never_ends", "test_one_that_does_not_end_for_long_never_does"),
            ),
            _out(
                "28-its-node-stays",
                MACHINE,
                "        self.job.given_up[name] = why\n",
                "        return\n",
                *_unit("never_ends", "test_its_node_is_given_up_and_its_ranks_go_elsewhere"),
            ),
        ),
        without="a driver that never returns needs GPUs; the kernel's freezer stands for it",
    ),
    Row(
        29,
        "an NVSwitch error that ends the use of a node is told from those that do not",
        (
            _out(
                "29-none-ends-a-node",
                SXID,
                "Severity.FATAL if found.number in ALWAYS_FATAL else Severity.WARNING",
                "Severity.WARNING",
                *_unit("health_nvswitch"),
            ),
            _out(
                "29-what-was-corrected-counts",
                SXID,
                "    if found.number in CORRECTED:\n        return None\n",
                "",
                *_unit("health_nvswitch"),
            ),
            _out(
                "29-what-was-there-before-counts",
                NVSWITCH,
                "    os.lseek(log, 0, os.SEEK_END)\n",
                "",
                *_unit("health_nvswitch", "test_what_was_there_before_the_job_is_none_of_it"),
            ),
            _out(
                "29-a-lost-record-ends-the-look",
                NVSWITCH,
                "                continue\n",
                "                break\n",
                *_unit("health_nvswitch", "test_each_look_has_what_has_come_since_the_last_one"),
            ),
        ),
        without="the lines of a real switch's driver need one",
    ),
    Row(
        30,
        "new communicators are made while the old ones are aborted, and nothing is launched before those have returned",
        (
            _out(
                "30-nothing-waits-for-the-aborts",
                ABANDON,
                "        _wait_for_aborts(epoch, began + deadline_s)\n        stuck = stuck_aborts()\n",
                "        stuck = ()\n",
                f"{FAKE_JOBS}::test_the_time_of_an_abort_is_hidden_behind_the_new_communicators",
            ),
            _out(
                "30-what-stands-there-later-is-aborted",
                NATIVE,
                "      here->abortInners(inners);\n",
                "      here->abortInners(here->snapshot());\n",
                f"{FAKE}::test_communicators_are_made_while_others_are_aborted",
            ),
            _out(
                "30-the-aborts-come-first",
                RECOVER,
                "not self._aborts_stuck and groups.may_connect_beside_aborts()",
                "False",
                f"{FAKE_JOBS}::test_the_time_of_an_abort_is_hidden_behind_the_new_communicators",
            ),
            _out(
                "30-room-is-not-asked-for",
                ABANDON,
                "    return accelerator().free_bytes() >= ENOUGH_FREE_BYTES\n",
                "    return True\n",
                f"{FAKE}::test_without_room_or_with_registered_tensors_the_aborts_come_first",
            ),
            _out(
                "30-registered-tensors-do-not-matter",
                ABANDON,
                'os.environ.get(_REGISTERS, "0").lower() not in _NO',
                "False",
                f"{FAKE}::test_without_room_or_with_registered_tensors_the_aborts_come_first",
            ),
            _out(
                "30-a-newer-recovery-waits-for-them",
                ABANDON,
                "stuck_aborts() and STATE.abandonments == epoch and",
                "stuck_aborts() and",
                f"{FAKE}::test_communicators_that_were_made_in_vain_are_aborted_before_anything_is_launched",
            ),
            _out(
                "30-what-was-made-in-vain-is-forgotten",
                ABANDON,
                "    return (*aborting, _IN_VAIN) if module.discarding() else tuple(aborting)\n",
                "    return tuple(aborting)\n",
                f"{FAKE}::test_communicators_that_were_made_in_vain_are_aborted_before_anything_is_launched",
            ),
            _out(
                "30-only-the-newest-abandonment-counts",
                ABANDON,
                "        stuck = stuck_aborts() if aborts else ()  # also of an earlier abandonment\n",
                "        stuck = tuple(name for name, outer in named if aborts and module.aborting(outer))\n",
                f"{FAKE}::test_an_abort_that_does_not_return_is_named",
            ),
        ),
        without="whether memory that an abort frees and the making of a communicator block each other needs GPUs",
    ),
    Row(
        31,
        "a rank has come to what its device has come to, not to what its host has launched",
        (
            _out(
                "31-nothing-is-marked",
                NATIVE,
                '    if (kind_ == "nccl" && type != OpType::COALESCED) '
                "course_.launches({name, ordinal, type == OpType::SEND}, device);\n",
                "",
                f"{FAKE}::test_what_a_device_has_not_come_to_is_only_launched",
            ),
            _out(
                "31-what-is-launched-is-under-way",
                CONTROL,
                "group.pending if on_device is None else (on_device,)",
                "group.pending",
                f"{FAKE}::test_what_a_device_has_not_come_to_is_only_launched",
            ),
            _out(
                "31-collectives-count-when-they-are-launched",
                REGISTRY,
                "            collectives = min(collectives, number)\n",
                "            pass\n",
                *_unit("hang_verdict", "test_what_a_device_has_come_to"),
            ),
            _out(
                "31-sends-and-receives-count-when-they-are-launched",
                REGISTRY,
                "(min(sent, number), received) if sends else (sent, min(received, number))",
                "(sent, received)",
                *_unit("hang_verdict", "test_what_a_device_has_come_to"),
            ),
        ),
        without="that an event of a stream tells this on a GPU needs one",
    ),
    Row(
        32,
        "a slow device is told from those that wait for it, by events",
        (
            _out(
                "32-synchronous-operations-are-not-seen",
                NATIVE,
                "      if (work || section_.openHere()) synchronous.none();\n",
                "      synchronous.none();\n",
                f"{FAKE}::test_a_slow_device_is_told_from_one_that_waits_for_it",
            ),
            _out(
                "32-waits-for-a-work-are-not-seen",
                WORK,
                "    const DevicePace::Wait waits;\n    try {\n",
                "    try {\n",
                f"{FAKE}::test_a_slow_device_is_told_from_one_that_waits_for_it",
            ),
            _out(
                "32-futures-do-not-matter",
                WORK,
                "    DevicePace::instance().futureTaken();\n",
                "",
                f"{FAKE}::test_a_step_with_a_wait_that_is_not_seen_says_nothing",
            ),
            _out(
                "32-the-stream-does-not-matter",
                DEVICE_PACE,
                "if (made && made->sameStream(*now_->begin)) return made;",
                "return made;",
                f"{FAKE}::test_a_step_with_a_wait_that_is_not_seen_says_nothing",
            ),
            _out(
                "32-what-has-not-come-is-asked",
                DEVICE_PACE,
                "if (past_->end->come()) return",
                "return",
                f"{FAKE}::test_events_that_have_not_come_say_nothing_and_are_not_waited_for",
            ),
            _out(
                "32-ddps-wait-is-not-seen",
                DDP_ADAPTER,
                "        backward_waits_for_futures()\n",
                "",
                f"{SLOW_DEVICES}::test_a_rank_whose_device_is_slow_is_named_and_those_that_wait_for_it_are_not",
            ),
            _out(
                "32-the-hosts-clock-tells",
                GATE,
                "underway_ns(), device_own_ns())",
                "underway_ns())",
                f"{SLOW_DEVICES}::test_a_rank_whose_device_is_slow_is_named_and_those_that_wait_for_it_are_not",
            ),
        ),
        without="what the events cost on a GPU, and that their times tell this there, needs one",
    ),
)
MUTANTS = tuple(mutant for row in ROWS for mutant, _ in row.mutants)
TESTS = {mutant.name: tests for row in ROWS for mutant, tests in row.mutants}
UNCHANGED = "unchanged"
BUILD = (
    sys.executable,
    "-c",
    "from flashrecovery import groups; from tests.support import fake_nccl; groups.build(); fake_nccl.build()",
)


def _trial(folder: Path, number: int) -> Trial:
    """In a separate cache: every mutant of the C++ is another extension."""
    return Trial(folder / f"copy{number}", {"FLASHRECOVERY_CACHE": str(folder.resolve() / "cache")}, BUILD)


def _unchanged(folder: Path, limit_s: float) -> int:
    """All tests, without a mutant: they must pass."""
    tests = sorted({test for tests in TESTS.values() for test in tests if not test.startswith("--")})
    began = time.monotonic()
    outcome = _trial(folder, 0).run(None, tests, limit_s)
    passed = outcome == SURVIVED
    print(f"{UNCHANGED:32} {time.monotonic() - began:5.0f} s  {'all tests pass' if passed else outcome}", flush=True)
    return 0 if passed else 1


def main() -> int:
    parser = arguments(__doc__, "nccl", 300)
    args = parser.parse_args()
    names = [name for name in args.names if name != UNCHANGED]
    failed = 0
    if len(names) < len(args.names) or not names:
        failed = _unchanged(args.folder, 3 * args.limit)
    if len(names) < len(args.names) and not names:
        return failed
    for row in ROWS:
        if not names and row.without:
            print(f"row {row.number}: {row.without}")
    survivors = run(
        chosen(MUTANTS, names),
        lambda mutant: TESTS[mutant.name],
        lambda number: _trial(args.folder, number),
        jobs=1,
        limit_s=args.limit,
        minutes=args.minutes,
    )
    return 1 if survivors or failed else 0


if __name__ == "__main__":
    sys.exit(main())
