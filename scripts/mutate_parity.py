"""Break parity in listed ways, one at a time, and say which ways no test notices.

    scripts/mutate_parity.py [NAME...]    names of mutants, or parts of them (default: all)

Parity is worth nothing where it is quietly wrong: a group that goes on without noticing that its parity is not that of
its bytes loses its state with the next node. It works in copies of the tree below ``--folder`` and ends with exit
status 1 if a mutant has survived.
"""

from __future__ import annotations

import sys

from mutants import Mutant, Trial, arguments, chosen, run

REDUNDANCY = "common/flashrecovery/redundancy"
COPIES, MAKING, ROUNDS, DECODE, EXCHANGE, FLAT = (
    f"{REDUNDANCY}/{name}.py"
    for name in (
        *(f"parity/{part}" for part in ("copies", "making", "rounds", "decode")),
        *("memory/peer_exchange", "memory/flat_buffer"),
    )
)
DECODING = "common/flashrecovery/plan/parity/decodable.py"
GROUPS = "common/flashrecovery/plan/parity/groups.py"
PLACEMENT, SOURCES = (
    f"common/flashrecovery/plan/{name}.py" for name in ("membership/placement", "restore/restore_plan")
)
TESTS = (
    *(
        f"tests/unit/test_{name}.py"
        for name in ("parity_decisions", "plan_decoding", "plan_choice", "plan_placement", "plan_sources", "flat")
    ),
    "tests/integration/redundancy/test_parity_copies.py",
    "tests/integration/redundancy/test_copies_recovery.py",
)

MUTANTS = (
    # -- an exchange ------------------------------------------------------------------------------
    Mutant("base-that-a-member-lacks", MAKING, " | {s.before for s in states}", ""),
    Mutant("always-from-nothing", MAKING, "bases.pop() if len(bases) == 1 else NO_BASE", "NO_BASE"),
    Mutant("what-is-whole-is-made-again", MAKING, "if newest < version)", "if newest <= version)"),
    Mutant("nothing-is-made-after-a-loss", MAKING, "if newest < version)", "if 0 <= newest < version)"),
    Mutant("without-asking", COPIES, "if all(state.whole for state in states):", "if True:"),
    Mutant(
        "told-one-member-only",
        COPIES,
        "for i in range(1, self.losses + 1)]\n        self._tellers",
        "for i in range(1, 2)]\n        self._tellers",
    ),
    Mutant("key-without-layouts", MAKING, "(ranks, sizes, idents)), losses", "(ranks, sizes)), losses"),
    Mutant("old-encoding-goes-too-early", COPIES, "if e.newest < newest]", "if e.newest <= newest]"),
    Mutant("no-wait", EXCHANGE, "        with self.undo.between.resting():\n            self._background.wait()\n", ""),
    Mutant("last-batch-too-early", ROUNDS, "last and not self._member.owes_sums(to)", "last"),
    Mutant("batch-is-free-before-it-is-sent", ROUNDS, "batches.append(batch)", "self._memory.give(batch)"),
    Mutant(
        "batch-has-two-owners",
        ROUNDS,
        '    self._batch, self._bytes, self.used = None, memoryview(b""), 0\n',
        "    self.used = 0\n",
    ),
    Mutant("gaps-are-not-zero", FLAT, "            self.buffer.zero_()\n", "            pass\n"),
    # -- what it is of ----------------------------------------------------------------------------
    Mutant(
        "replicas-count-wherever-they-are",
        PLACEMENT,
        "_differ(losses, map(domains.__getitem__, holders)) or ",
        "True or ",
    ),
    Mutant("one-copy-is-enough-for-two-losses", PLACEMENT, "_differ(losses, map(", "_differ(1, map("),
    Mutant("copy-stays-in-the-domain", PLACEMENT, " or domains[keeper(h)] not in lost]", "]"),
    Mutant("decoded-though-it-is-there", SOURCES, "{Kind.PARITY: 1, Kind.CHECKPOINT: 2}", "{Kind.CHECKPOINT: 2}"),
    # -- a recovery -------------------------------------------------------------------------------
    Mutant("void-parity-stays", COPIES, "            encoding.member.drop_after(version)\n", "            pass\n"),
    Mutant("void-local_states-stay", COPIES, "            slot.drop_after(version)\n", "            pass\n"),
    Mutant("old-group-stays", COPIES, "        self._change_group()\n", ""),
    Mutant(
        "group-changes-at-once",
        COPIES,
        "        self._next_ranks = tuple(ranks)\n",
        "        self._next_ranks = tuple(ranks)\n        self._change_group()\n",
    ),
    Mutant("digests-are-not-compared", DECODE, "columns, parity, wanted)", "columns, parity)"),
    Mutant(
        "parity-is-not-compared",
        DECODE,
        "found += store.bucket(version, bucket)",
        "found += store._content(store._record(version).slots[bucket], bucket)",
    ),
    Mutant("doubt-is-forgotten", DECODING, " - doubted\n", "\n"),
    Mutant(
        "own-shards-of-any-length",
        DECODING,
        "own = members[rank].own.get(version) == layout.sizes[member]",
        "own = version in members[rank].own",
    ),
    Mutant(
        "more-than-parity-covers",
        DECODING,
        "if not lost or undecodable(layout, held, version) is not None:",
        "if not lost:",
    ),
    Mutant("layout-of-any-version", DECODING, "(told.owner, told.version) == (owner, version)", "told.owner == owner"),
    Mutant("second-parity-of-its-own-stripe", DECODING, "((member - 1) % n, StripePart.Q)", "(member, StripePart.Q)"),
    Mutant(
        "stale-groups-count",
        GROUPS,
        "key=lambda ranks: (-named[ranks], ranks)",
        "key=lambda ranks: (named[ranks], ranks)",
    ),
)


def main() -> int:
    parser = arguments(__doc__, "parity", 600)
    parser.add_argument("--jobs", type=int, default=1, help="at the same time (a job has up to six ranks)")
    args = parser.parse_args()
    survivors = run(
        chosen(MUTANTS, args.names),
        lambda mutant: TESTS,
        lambda number: Trial(args.folder / f"copy{number}"),
        jobs=args.jobs,
        limit_s=args.limit,
        minutes=args.minutes,
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
