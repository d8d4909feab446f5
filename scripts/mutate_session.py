"""Break the worker's loop and its recoverer in listed ways, one at a time, and say which ways no test notices.

    scripts/mutate_session.py [NAME...]    names of mutants, or parts of them (default: all)

A session shows what it is worth only in real processes that lose a real rank. So these mutants are chosen by hand and
run against whole jobs: minutes for one that survives, and more with ``--all-tests``. It works in copies of the tree
below ``--folder`` and ends with exit status 1 if a mutant has survived. docs/testing.md judges the survivors.
"""

from __future__ import annotations

import sys

from mutants import Mutant, Trial, arguments, chosen, run

SESSION, LOOP, STEP, SEALING, HABITS, TOUCHES, PROVING, COLLECTIVES, STOPS, PROOF, RECOVER, VOID, SCALER, OPTIMIZERS = (
    f"common/flashrecovery/worker/{name}.py"
    for name in (
        "session",
        "loop",
        "step/transaction",
        "step/sealing",
        "local_state/step_profile",
        "consistency/early_writes",
        "consistency/divergence_check",
        "step/collectives",
        "control/interruption",
        "consistency/divergence_check",
        "recovery_commands",
        "step/discarded_run",
        "local_state/grad_scaler",
        "script_checks/optimizer_watch",
    )
)
MODES, GRADIENTS = "common/flashrecovery/adapter/modes.py", "common/flashrecovery/adapter/gradients.py"
UNDO = "common/flashrecovery/redundancy/memory/own_copy.py"
KEPT = "    def committed(self) -> None:\n        pass"
UNIT = (
    "data_stream",  # before any that leaves gRPC's threads behind: it forks data loaders' workers
    "sealing",
    "transaction",
    "worker_loop",
    "module_attributes",
    "step_on_device",
    "recovery_commands",
    "session_heartbeats",
    "registered",
    "versions",
    "loop_checks",
    "wait_for_stop",
    "torch_native",
    "habits",
    "copies_in_time",
    "scaler",
    "optimizer_watch",
    "unregistered",
    "copy_beside_writes",
    "structure_watch",
    "gradient_watch",
)
LAUNCHER = "tests/integration/launchers/test_launcher.py"
LOOPS = (*(f"tests/unit/test_{name}.py" for name in UNIT), "tests/conformance/test_loops.py")
QUICK = (
    *LOOPS,
    f"{LAUNCHER}::test_wrong_use_ends_the_job_with_its_reason",
    f"{LAUNCHER}::test_a_step_that_always_fails_ends_the_job",
    f"{LAUNCHER}::test_an_exception_between_two_steps_is_a_failure_like_any_other",
    f"{LAUNCHER}::test_bitwise_whatever_the_body_does",
    f"{LAUNCHER}::test_a_survivor_whose_collective_fails_before_it_hears_why_is_not_lost",
)
ALL = (*LOOPS, LAUNCHER, "tests/integration/frameworks/test_torch_native_recovery.py")

MUTANTS = (
    # -- what is registered is more than its tensors and its state_dict() ----------------------------
    Mutant("scaler-remembers", SCALER, "            self._scaler._per_optimizer_states.clear()", "            pass"),
    Mutant("stays-frozen", MODES, "            if parameter.requires_grad != wanted:", "            if False:"),
    Mutant("freezing-unseen", MODES, "if now != then]", "if False]"),
    Mutant("attributes-stay", MODES, "copy.deepcopy(state[place])", "attributes.get(key)"),
    Mutant("strangers-step", OPTIMIZERS, "!= version or", "!= version and False or"),
    Mutant("gradients-may-stay", GRADIENTS, " and bool(local_tensor(one.gradient).any())", " and False"),
    Mutant("looks-in-the-midst", UNDO, "self.between.ask(look, bound_s)", "look()"),
    Mutant("structure-stays", UNDO, "or not known.same()", "or False"),
    Mutant("loop-counts-along", LOOP, "            check_loop(frame)", "            pass"),
    # -- a version is complete when it is handed out ------------------------------------------------
    Mutant("resumed-is-settled", LOOP, "self._unsettled, self._committed = True, False", "self._committed = False"),
    Mutant(
        "resumed-counts-as-committed",
        LOOP,
        "self._unsettled, self._committed = True, False",
        "self._unsettled = self._committed = True",
    ),
    Mutant("no-proof", PROVING, "        self.due = generation > 0\n", "        self.due = False\n"),
    Mutant("always-proof", PROVING, "    def committed(self) -> None:\n        self.due = False", KEPT),
    Mutant("spoiled-counts", LOOP, "            if self._cut_short_below:", "            if False:"),
    Mutant(
        "not-sealed-late",
        SEALING,
        "            self._write(version, shown.at_end, early=False)\n",
        "            pass\n",
    ),
    Mutant("late-is-finished", SEALING, "        if self._written == shown.at_end:", "        if True:"),
    Mutant("published-though-stopped", LOOP, "self._published = not gate.stopped", "self._published = True"),
    Mutant("touched-is-not-kept", LOOP, "        if habits.touched or not habits.known:\n", "        if False:\n"),
    Mutant("not-copied", LOOP, "        self.copies.start(version)\n", ""),
    Mutant(
        "restored-local_state-not-in-page",
        LOOP,
        "                self._gate.page.write_local_state(version, local_state)\n",
        "                pass\n",
    ),
    Mutant("late-not-told", SEALING, "self.late[version] = now != before", "self.late[version] = False"),
    # -- a void run is taken back ----------------------------------------------------------------------
    Mutant(
        "void-run-lasts",
        LOOP,
        "        if self._discarded_run is not None:\n            self._take_back",
        "        if False:\n            self._take_back",
    ),
    Mutant("void-tensors-last", LOOP, "        discarded_run.take_back()\n", ""),
    Mutant("void-plain-lasts", LOOP, "        self.restore_plain(self._gate.version, fresh=False)\n", ""),
    Mutant(
        "void-gradients-last",
        LOOP,
        "            adapter.reset()\n        discarded_run",
        "            pass\n        discarded_run",
    ),
    Mutant("void-run-fetches-data", VOID, "        self._void(True)\n", ""),
    Mutant("void-data-stays-void", VOID, "        self._void(False)\n", ""),
    Mutant("void-run-no-end", LOOP, "        discarded_run.end()\n", ""),
    Mutant("void-leaver-is-done", LOOP, "            self._left_in_discarded_run()\n", "            pass\n"),
    Mutant("newer-plain-stays", LOOP, "            shard.drop_after(version)", "            pass"),
    # -- before the mutation ------------------------------------------------------------------------------
    Mutant("begin-keeps-seals", STEP, "        self._sealing.step_begins()\n", ""),
    Mutant(
        "begin-keeps-hook",
        STEP,
        "        self._hook_fired = self._copied = False\n        self._worker.faults",
        "        self._copied = False\n        self._worker.faults",
    ),
    Mutant("begin-keeps-failures", COLLECTIVES, "        self._failures = groups.failure_count()\n", "        pass\n"),
    Mutant("recheck-is-blind", SEALING, "if recheck and now == self._at_seal:", "if recheck:"),
    Mutant(
        "copies-not-awaited",
        STEP,
        "            self._copies.wait()\n            self._copied = True",
        "            self._copied = True",
    ),
    Mutant(
        "copies-of-a-step-before",
        STEP,
        "self._hook_fired = self._copied = False\n        self._worker",
        "self._hook_fired = False\n        self._worker",
    ),
    Mutant(
        "failed-collective-is-passed",
        STEP,
        "        self._refuse_failed_collectives()\n        self._gate.check()\n",
        "        self._gate.check()\n",
    ),
    Mutant("changed-is-not-sealed", SEALING, "if sealed and self._written != now:", "if False:"),
    Mutant("no-barrier", STEP, "elif self._barrier_is_due(", "elif False and self._barrier_is_due("),
    Mutant("no-barrier-after-late-copies", STEP, " or late\n", "\n"),
    Mutant("habits-not-compared", STEP, "if divergence_check.is_due(version):", "if False:"),
    Mutant(
        "barrier-is-not-said",
        STEP,
        "            with self._gate.in_barrier():\n                group",
        "            if True:\n                group",
    ),
    Mutant(
        "more-is-not-sealed",
        STEP,
        "            if self._compare_habits():",
        "            if self._compare_habits() and False:",
    ),
    Mutant("never-touched", STEP, "if touched and not habits.touched:", "if False:"),
    Mutant("touched-by-data-unseen", TOUCHES, "        if not self._registry.habits.known:\n", "        if False:\n"),
    Mutant(
        "step-outside-block",
        STEP,
        "        if not self._gate.in_block:\n            raise Unsupp",
        "        if False:\n            raise Unsupp",
    ),
    # -- the commit ---------------------------------------------------------------------------------------
    Mutant("torn-is-committed", STEP, "            self._refuse_torn()\n        else", "        else"),
    Mutant(
        "unmutated-not-sealed",
        STEP,
        "            self._before_mutation(version, seen_forward=False)\n            self.quiet",
        "            self.quiet",
    ),
    Mutant(
        "unmutated-failed-is-passed",
        STEP,
        "            self._refuse_failed_collectives()\n            self._copies.wait()",
        "            self._copies.wait()",
    ),
    Mutant("no-stand-in", STEP, "groups.stand_in(outside)", "pass"),
    Mutant("stand-in-stays", LOOP, "leave_outside()\n            groups.stand_in(False)\n", "leave_outside()\n"),
    Mutant("stand-ins-from-start", STEP, "            self._collectives.step_is_committed()\n", ""),
    Mutant(
        "outside-not-watched",
        LOOP,
        "        if not self._own_calls:\n            self._between(True)",
        "        pass",
    ),
    Mutant("late-never-learnt", HABITS, "if late and not self.late:", "if False:"),
    Mutant("undo-never-learnt", HABITS, "if not quiet and not self.undo:", "if False:"),
    Mutant("changed-never-learnt", HABITS, "if changed and not self.reseal and not self.changed:", "if False:"),
    # -- the start -----------------------------------------------------------------------------------------
    Mutant("own-objects-are-common", SESSION, "registry.habits.add_own(objects)", "pass"),
    Mutant("own-settings-are-common", SESSION, "registry.habits.begin_with_own_settings(settings)", "pass"),
    Mutant(
        "replicas-not-compared", PROOF, "    if not split([summary for _, summary in everybody]):", "    if everybody:"
    ),
    Mutant("start-not-sealed", RECOVER, "            self._loop.seal_start()\n", ""),
    Mutant("world-not-checked", SESSION, "        check_world(registry.rank, registry.world_size)\n", ""),
    Mutant(
        "second-loop-runs",
        SESSION,
        "        if self._loop is not None:\n            raise JobFailed",
        "        if False:\n            raise JobFailed",
    ),
    # -- whose failure it is -------------------------------------------------------------------------------
    Mutant("no-stop-follows", STOPS, "return self._gate.stopped or self._follows(error)", "return self._gate.stopped"),
    Mutant("every-error-is-a-stop", STOPS, "return self._gate.stopped or self._follows(error)", "return True"),
    # -- the controller's commands -----------------------------------------------------------------------
    Mutant(
        "stop-touched-not-torn",
        RECOVER,
        "        if worker.gate.live >= 0 and self._loop.touched:\n            worker.gate.torn()\n",
        "",
    ),
    Mutant("stop-copies-run-on", RECOVER, "        self._loop.copies.stop()\n", ""),
    Mutant("stop-not-drained", RECOVER, "        if not report.quiet:", "        if False:"),
    Mutant(
        "stop-late-not-told",
        RECOVER,
        "        reply.late.extend(sorted(v for v, late in self._loop.sealing.late.items() if late))\n",
        "",
    ),
    Mutant(
        "stop-no-reset",
        RECOVER,
        "                self._reset()\n            except",
        "                pass\n            except",
    ),
    Mutant("fresh-stays", RECOVER, "        self._fresh = False\n        if worker", "        if worker"),
    Mutant(
        "never-fresh",
        RECOVER,
        "self._fresh = True  # the data sources of",
        "self._fresh = False  # the data sources of",
    ),
    Mutant("further-back-is-not-fresh", RECOVER, "fresh=self._fresh or version < self._came_at", "fresh=self._fresh"),
    Mutant("transfer-not-torn", RECOVER, "        if arriving:\n            worker.gate.torn()\n", ""),
    Mutant(
        "undo-not-torn",
        RECOVER,
        "                worker.gate.torn()\n                self._loop.copies.restore_own",
        "                self._loop.copies.restore_own",
    ),
    Mutant(
        "undo-not-restored",
        RECOVER,
        "                self._loop.copies.restore_own(shard, version)\n",
        "                pass\n",
    ),
    Mutant(
        "digests-not-looked-at", RECOVER, "wrong = report.mismatched if worker.settings.verify else []", "wrong = []"
    ),
    Mutant("wrong-is-adopted", RECOVER, "if n not in wrong", "if True"),
    Mutant(
        "plain-not-restored",
        RECOVER,
        "        self._loop.restore_plain(version, fresh=self._fresh or version < self._came_at)\n",
        "",
    ),
    Mutant("joined-is-not-live", RECOVER, "            worker.gate.initialised()\n", "            pass\n"),
    Mutant(
        "needs-never-told-again",
        RECOVER,
        "if self._told != (command.stop.needs_known, needs):",
        "if not self._told[1]:",
    ),
    Mutant("held-early-not-said", RECOVER, "early=shard.early(v),", "early=False,"),
    Mutant("page-early-not-said", RECOVER, "early=v in early)", "early=False)"),
    Mutant("page-of-before-not-offered", RECOVER, "        if not recently or not", "        if True or not"),
    Mutant(
        "outdated-is-obeyed",
        RECOVER,
        "        if worker.gate.outdated(command.generation):\n            return False\n        body",
        "        body",
    ),
    Mutant(
        "nothing-let-go",
        LOOP,
        "count = activation_release.release(self._cut_short_by, self._graphs_since)",
        "count = 0",
    ),
    Mutant("stays-detached", RECOVER, "        groups.set_detached(False)\n", ""),
)


def main() -> int:
    parser = arguments(__doc__, "session", 900)
    parser.add_argument("--all-tests", action="store_true", help="more of the launcher's tests, and plain PyTorch's")
    parser.add_argument("--jobs", type=int, default=1, help="at the same time (a job has up to four ranks)")
    args = parser.parse_args()
    survivors = run(
        chosen(MUTANTS, args.names),
        lambda mutant: ALL if args.all_tests else QUICK,
        lambda number: Trial(args.folder / f"copy{number}"),
        jobs=args.jobs,
        limit_s=args.limit,
        minutes=args.minutes,
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
